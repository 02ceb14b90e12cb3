"""Triton's kernels on the CPU, in the interpreter that Triton has for debugging."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def interpret_triton() -> None:
    """Let Triton kernels that are defined from now on run on CPU tensors, for as long as this process lives.

    Two things that Liger's kernels need are missing in Triton's interpreter: arguments that are Python floats, and the
    functions of CUDA's math library.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(argument: Any) -> Any:
        if type(argument) is float:
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_floats_too
    # Looked up when a kernel runs: the interpreter replaces what is in `tl` then.
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
