"""Checks of the options that decide in what precision, and by what code, a model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prefrl.errors import ConfigError
from prefrl.options.suggest import nearest

if TYPE_CHECKING:
    from prefrl.trainer.base.config import BaseConfig

__all__ = ["check_precision"]

# Of torch.compile: they replay recorded kernels on fixed memory, which rows of other lengths do not fit into.
_RECORDING = ("reduce-overhead", "max-autotune")
_FP8_SINCE = (8, 9)  # compute capability


def check_precision(config: BaseConfig) -> None:
    """Reject precisions that the device does not have, and what torch.compile cannot do here.

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
    if config.fp8:
        _check_fp8(config)
    if config.torch_compile:
        _check_compilation(config)


def _check_fp8(config: BaseConfig) -> None:
    device = config.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_SINCE:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        raise ConfigError(
            f"fp8=True on {name}: products in 8 bits need a GPU of compute capability 8.9 or higher (Ada, Hopper, "
            "Blackwell). Set bf16=True alone."
        )
    if not config.bf16:
        raise ConfigError("fp8=True with bf16=False: what is not in 8 bits is in bfloat16. Set bf16=True.")


def _check_compilation(config: BaseConfig) -> None:
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
    if config.log_flops:
        raise ConfigError(
            "log_flops=True with torch_compile=True: operations inside compiled code are not counted. Set one of "
            "them to False."
        )
