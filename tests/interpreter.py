"""Triton's kernels on the CPU, in the interpreter that Triton has for debugging."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

# Triton and Liger. They have a folder of their own, which `make` fills: with Triton at hand, other packages choose
# other code, and imports take longer.
PACKAGES = Path(os.environ.get("PREFRL_KERNELS", Path(__file__).parents[1] / ".venv-kernels"))


def environment() -> dict[str, str]:
    """The variables of a process that runs Triton's kernels in the interpreter."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": path}


def repair() -> None:
    """Add to the interpreter, in a process with these variables, what Liger's kernels need and it does not have.

    These are arguments that are Python floats, and functions of CUDA's math library.
    """
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
    # Looked up when a kernel runs: the interpreter has then replaced what is in `tl`.
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
