"""Rows of the loss tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossRow", "keyword_names"]


def keyword_names(function: Callable[..., object]) -> frozenset[str]:
    """Names of the keyword-only arguments of a loss: its hyperparameters."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class LossRow:
    """A loss and its source. Each table documents what its functions take and return."""

    function: Callable[..., Tensor]
    source: str

    @property
    def hyperparameters(self) -> frozenset[str]:
        """Names of the keyword arguments that the function needs."""
        return keyword_names(self.function)
