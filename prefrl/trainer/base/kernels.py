"""Changes of a model that the options ask for: Liger's kernels, products in 8 bits, compiled layers, no dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prefrl.models.kernels import apply_liger, compile_layers, compute_in_fp8
from prefrl.models.modes import disable_dropout

if TYPE_CHECKING:
    from torch import nn

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["add_kernels", "change_layers", "change_policy"]


def add_kernels(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy or a reference model with Liger's kernels if the options say so; see `apply_liger`."""
    if args.use_liger_kernel:
        apply_liger(model, cast("dict[str, bool]", args.liger_kernel_config))


def change_layers(args: BaseConfig, model: nn.Module) -> None:
    """Let the layers of the policy or a reference model compute in 8 bits, and compile them, if the options say so."""
    if args.fp8:
        compute_in_fp8(model)
    if args.torch_compile:
        compile_layers(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def change_policy(args: BaseConfig, model: nn.Module) -> None:
    """Change the policy as the options say; without dropout, that of its adapter is off, too."""
    add_kernels(args, model)
    change_layers(args, model)
    if args.disable_dropout:
        disable_dropout(model)
