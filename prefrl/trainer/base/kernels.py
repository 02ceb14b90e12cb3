"""Changes of a model that the options ask for: Liger's kernels, compiled layers, no dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prefrl.models.compilation import compile_layers
from prefrl.models.liger import apply_liger
from prefrl.models.modes import disable_dropout

if TYPE_CHECKING:
    from torch import nn

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["add_kernels", "change_policy", "compile_if_asked"]


def add_kernels(args: BaseConfig, model: nn.Module) -> None:
    """Patch the policy or a reference model with Liger's kernels if the options say so; see `apply_liger`."""
    if args.use_liger_kernel:
        apply_liger(model, cast("dict[str, bool]", args.liger_kernel_config))


def compile_if_asked(args: BaseConfig, model: nn.Module) -> None:
    """Compile the layers of the policy or a reference model if the options say so; see `compile_layers`."""
    if args.torch_compile:
        compile_layers(
            model,
            backend=args.torch_compile_backend,
            mode=args.torch_compile_mode,
            checkpointed=args.activation_checkpointing,
        )


def change_policy(args: BaseConfig, model: nn.Module) -> None:
    """Change the policy as the options say: its kernels, compiled layers, no dropout, that of its adapter included."""
    add_kernels(args, model)
    compile_if_asked(args, model)
    if args.disable_dropout:
        disable_dropout(model)
