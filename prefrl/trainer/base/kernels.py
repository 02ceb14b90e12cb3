"""Installs Liger's kernels if the options ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prefrl.models.liger import apply_liger

if TYPE_CHECKING:
    from torch import nn

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["add_kernels"]


def add_kernels(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy or a reference model with Liger's kernels if the options say so; see `apply_liger`."""
    if args.use_liger_kernel:
        apply_liger(model, cast("dict[str, bool]", args.liger_kernel_config))
