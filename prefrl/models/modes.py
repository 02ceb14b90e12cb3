"""Change a model's modes temporarily, its dropout, and what it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["checkpoint_activations", "disable_dropout", "dropout_rates", "eval_mode", "uncompiled"]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and gradient checkpointing inside, and restore every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, attribute name) for every attribute that is a dropout rate above 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            names = ["p"]
        else:
            names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        yield from ((module, name) for name in names if getattr(module, name) > 0)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate of the model to 0, including those of adapters."""
    for module, name in list(dropout_rates(model)):
        setattr(module, name, 0.0)


def checkpoint_activations(model: PreTrainedModel, arguments: dict[str, Any] | None = None) -> None:
    """Keep only the inputs of the layers for the backward pass, as HuggingFace's loop does for the policy.

    Args:
        model: Changed in place; its new mode acts while it trains.
        arguments: As in `activation_checkpointing_kwargs`.
    """
    of_checkpoint = dict(arguments or {})
    of_layers = {name: of_checkpoint.pop(name) for name in ("every_n_layers", "offload") if name in of_checkpoint}
    # The second name is that of transformers before 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(of_checkpoint or None, **of_layers)


def uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled modules run as they are written."""
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context
