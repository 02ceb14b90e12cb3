"""Changes of a model that the options ask for: Liger's kernels, no dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prefrl.models.liger import apply_liger
from prefrl.models.modes import disable_dropout

if TYPE_CHECKING:
    from torch import nn

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["add_kernels", "change_policy"]


def add_kernels(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy or a reference model with Liger's kernels if the options say so; see `apply_liger`."""
    if args.use_liger_kernel:
        apply_liger(model, cast("dict[str, bool]", args.liger_kernel_config))


def change_policy(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy with kernels, and switch off its dropout and that of its adapter, if the options say so."""
    add_kernels(args, model)
    if args.disable_dropout:
        disable_dropout(model)
