"""Change a model's modes temporarily, and its dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["disable_dropout", "dropout_rates", "eval_mode"]


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
