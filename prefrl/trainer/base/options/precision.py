"""Options that decide in what precision, and by what code, a model computes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.optional import MissingPackageError, is_installed
from prefrl.options.rules import apply
from prefrl.options.run_rules import COMPILATION_RULES, check_device
from prefrl.options.suggest import nearest

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_precision"]

logger = logging.getLogger(__name__)

_BF16_SINCE, _FP8_SINCE = (8, 0), (8, 9)  # compute capability


def check_precision(config: TrainingArguments, *, fp8: bool) -> None:
    """Reject precisions that the device does not have, and what torch.compile cannot do here.

    Args:
        config: HuggingFace's options.
        fp8: That of `PrecisionOptions`.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    check_device(config)
    if config.mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision: fp8 in accelerate's config, or ACCELERATE_MIXED_PRECISION=fp8: in prefrl, fp8 is an "
            "option of the run. Remove it, and set fp8=True with bf16=True."
        )
    if config.bf16 and config.device.type == "cuda":
        _warn_of_emulation(config.device)
    if fp8:
        _check_fp8(config)
    if config.torch_compile:
        _check_compilation(config)


def _warn_of_emulation(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < _BF16_SINCE and distributed.is_main():
        logger.warning(
            "bf16=True on %s: it has no arithmetic in bfloat16, which is therefore emulated and slow. Set fp16=True, "
            "or neither",
            torch.cuda.get_device_name(device),
        )


def _check_fp8(config: TrainingArguments) -> None:
    device = config.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_SINCE:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        raise ConfigError(
            f"fp8=True on {name}: 8-bit products need a GPU of compute capability 8.9 or higher (Ada, Hopper, "
            "Blackwell). Set bf16=True alone."
        )
    if not config.bf16:
        raise ConfigError(
            "fp8=True with bf16=False: everything that is not computed in 8 bits is computed in bfloat16. Set "
            "bf16=True."
        )
    if not is_installed("torchao"):
        raise MissingPackageError("fp8=True needs torchao: pip install 'prefrl[fp8]'")


def _check_compilation(config: TrainingArguments) -> None:
    known = torch.compiler.list_backends(())
    if config.torch_compile_backend not in known:
        raise ConfigError(
            f"torch_compile_backend={config.torch_compile_backend!r}: unknown. "
            f"{nearest(str(config.torch_compile_backend), known)}"
        )
    apply(config, COMPILATION_RULES)
