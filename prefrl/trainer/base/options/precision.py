"""Options that decide in what precision, and by what code, a model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.options.suggest import nearest

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["PrecisionOptions", "check_precision"]

# Of torch.compile: they replay recorded kernels on fixed memory, which rows of other lengths do not fit into.
_RECORDING = ("reduce-overhead", "max-autotune")
_FP8_SINCE = (8, 9)  # compute capability


@dataclass
class PrecisionOptions:
    """Precision in addition to HuggingFace's options; see docs/profiling.md."""

    fp8: bool = opt(
        False,
        "Matrix products of the layers in 8-bit floating point, by torchao; with bf16=True, on GPUs that have it.",
    )


def check_precision(config: TrainingArguments, *, fp8: bool) -> None:
    """Reject precisions that the device does not have, and what torch.compile cannot do here.

    Args:
        config: HuggingFace's options.
        fp8: That of `PrecisionOptions`.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    if config.fp16 and config.device.type == "cpu":
        raise ConfigError(
            "fp16=True on the CPU: float16 is for GPUs, and has no effect here. Set bf16=True, or neither."
        )
    if config.mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision: fp8 in accelerate's config, or ACCELERATE_MIXED_PRECISION=fp8: is an option of the run "
            "here. Remove it, and set fp8=True with bf16=True."
        )
    if fp8:
        _check_fp8(config)
    if config.torch_compile:
        _check_compilation(config)


def _check_fp8(config: TrainingArguments) -> None:
    device = config.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_SINCE:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        raise ConfigError(
            f"fp8=True on {name}: products in 8 bits need a GPU of compute capability 8.9 or higher (Ada, Hopper, "
            "Blackwell). Set bf16=True alone."
        )
    if not config.bf16:
        raise ConfigError("fp8=True with bf16=False: what is not in 8 bits is in bfloat16. Set bf16=True.")


def _check_compilation(config: TrainingArguments) -> None:
    known = torch.compiler.list_backends(())
    if config.torch_compile_backend not in known:
        raise ConfigError(
            f"torch_compile_backend={config.torch_compile_backend!r}: unknown. "
            f"{nearest(str(config.torch_compile_backend), known)}"
        )
    if config.torch_compile_mode in _RECORDING:
        raise ConfigError(
            f"torch_compile_mode={config.torch_compile_mode!r}: records CUDA graphs, each for one length of rows, and "
            "rows have other lengths in every step. Leave it out, or set 'max-autotune-no-cudagraphs'."
        )
