"""What a row of a table of losses says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossRow"]


@dataclass(frozen=True, slots=True)
class LossRow:
    """A loss and where it comes from; what the function takes and returns stands with its table."""

    function: Callable[..., Tensor]
    source: str

    @property
    def hyperparameters(self) -> frozenset[str]:
        """Names of the keyword arguments that the function needs."""
        parameters = inspect.signature(self.function).parameters.values()
        return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
