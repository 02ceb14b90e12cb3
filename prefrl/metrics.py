"""Metrics with counts: merged over micro-batches on the device, over ranks once for each log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "merge"]



@dataclass(frozen=True, slots=True)
class Mean:
    """total / count; NaN where nothing was counted."""

    total: float | Tensor
    count: float | Tensor

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """As a host number."""
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over micro-batches and ranks."""

    total: float | Tensor

    def merge(self, other: Sum) -> Sum:
        """The sum of both."""
        return Sum(self.total + other.total)

    def value(self) -> float:
        """As a host number."""
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value over micro-batches and ranks."""

    extreme: float | Tensor

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return Max(torch.maximum(torch.as_tensor(self.extreme), torch.as_tensor(other.extreme)))

    def value(self) -> float:
        """As a host number."""
        return float(self.extreme)


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value over micro-batches and ranks."""

    extreme: float | Tensor

    def merge(self, other: Min) -> Min:
        """The smaller of both."""
        return Min(torch.minimum(torch.as_tensor(self.extreme), torch.as_tensor(other.extreme)))

    def value(self) -> float:
        """As a host number."""
        return float(self.extreme)


Metric = Mean | Sum | Max | Min


def merge(into: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Merge `more` into `into`, key by key.

    Raises:
        TypeError: A key is of one kind here and of another there.
    """
    for key, metric in more.items():
        if key not in into:
            into[key] = metric
        elif type(into[key]) is not type(metric):
            raise TypeError(f"metric {key!r} is {type(into[key]).__name__} and {type(metric).__name__}")
        else:
            into[key] = into[key].merge(metric)  # type: ignore[arg-type]  # same kind, checked above
