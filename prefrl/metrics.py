"""Metrics that carry their counts: merged over micro-batches on the device, and over ranks once per log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch
from torch import Tensor

# A variance below this share of the mean square is the rounding error of equal float32 numbers: eps^2 is 1.4e-14.
_ROUNDING_SHARE = 1e-13


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count; `empty` if nothing was counted."""

    total: float | Tensor
    count: float | Tensor
    empty: float = field(default=math.nan, compare=False)  # NaN does not equal itself

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.count + other.count, self.empty)

    def value(self) -> float:
        """As a host number."""
        count = float(self.count)
        return float(self.total) / count if count else self.empty


def token_mean(values: Tensor, trainable: Tensor) -> Mean:
    """Mean of [N] values over the tokens that are trainable, [N] bool."""
    return Mean((values * trainable).sum(), trainable.sum())


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of one set of values minus the mean of another; NaN if either set is empty."""

    total: float | Tensor
    count: float | Tensor
    other_total: float | Tensor
    other_count: float | Tensor

    def merge(self, other: Difference) -> Difference:
        """The difference over both."""
        return Difference(
            self.total + other.total,
            self.count + other.count,
            self.other_total + other.other_total,
            self.other_count + other.other_count,
        )

    def value(self) -> float:
        """As a host number."""
        return Mean(self.total, self.count).value() - Mean(self.other_total, self.other_count).value()


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
    """The smallest value over micro-batches and ranks; `empty` if there is none, which infinity stands for."""

    extreme: float | Tensor
    empty: float = math.inf

    def merge(self, other: Min) -> Min:
        """The smaller of both."""
        return Min(torch.minimum(torch.as_tensor(self.extreme), torch.as_tensor(other.extreme)), self.empty)

    def value(self) -> float:
        """As a host number."""
        extreme = float(self.extreme)
        return self.empty if extreme == math.inf else extreme


@dataclass(frozen=True, slots=True)
class Std:
    """Standard deviation (n-1) from sums of values and of squares; NaN below two values."""

    total: float
    total_of_squares: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Std:
        """From individual values."""
        numbers = list(values)
        return cls(sum(numbers), sum(x * x for x in numbers), len(numbers))

    def merge(self, other: Std) -> Std:
        """Over both."""
        squares = self.total_of_squares + other.total_of_squares
        return Std(self.total + other.total, squares, self.count + other.count)

    def value(self) -> float:
        """As a host number."""
        if self.count < 2:
            return float("nan")
        variance = (self.total_of_squares - self.total**2 / self.count) / (self.count - 1)
        return math.sqrt(max(variance, 0.0))


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Kong's effective sample size as a share of all samples: (sum w)^2 / (count * sum w^2); NaN without samples."""

    total: float | Tensor
    total_of_squares: float | Tensor
    count: float | Tensor

    def merge(self, other: EffectiveShare) -> EffectiveShare:
        """Over both."""
        squares = self.total_of_squares + other.total_of_squares
        return EffectiveShare(self.total + other.total, squares, self.count + other.count)

    def value(self) -> float:
        """As a host number."""
        denominator = float(self.count) * float(self.total_of_squares)
        return float(self.total) ** 2 / denominator if denominator else float("nan")


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """Share of the variance of the returns that a critic explains: 1 - Var(R - V) / Var(R).

    1: all of it. 0: as much as a constant, or the returns do not vary. Below 0: less than a constant.
    """

    total: float | Tensor  # of R
    total_of_squares: float | Tensor
    error_total: float | Tensor  # of R - V
    error_squares: float | Tensor
    count: float | Tensor

    @classmethod
    def of(cls, returns: Tensor, values: Tensor, trainable: Tensor) -> ExplainedVariance:
        """From [N] returns R and values V, over the tokens where `trainable` [N] bool is True."""
        # In float64, because the variance is a small difference of large sums.
        r = returns.detach().double().where(trainable, 0.0)
        e = (returns.detach().double() - values.detach().double()).where(trainable, 0.0)
        return cls(r.sum(), r.square().sum(), e.sum(), e.square().sum(), trainable.sum())

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Over both."""
        return ExplainedVariance(
            self.total + other.total,
            self.total_of_squares + other.total_of_squares,
            self.error_total + other.error_total,
            self.error_squares + other.error_squares,
            self.count + other.count,
        )

    def value(self) -> float:
        """As a host number."""
        count, squares = float(self.count), float(self.total_of_squares)
        spread = squares - float(self.total) ** 2 / max(count, 1.0)
        if not spread > _ROUNDING_SHARE * squares:
            return 0.0 if math.isfinite(spread) else math.nan
        return 1.0 - (float(self.error_squares) - float(self.error_total) ** 2 / count) / spread


Metric = Mean | Difference | Sum | Max | Min | Std | EffectiveShare | ExplainedVariance


def merge(into: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Merge `more` into `into`, key by key.

    Raises:
        TypeError: A key has different kinds of metrics in the two.
    """
    for key, metric in more.items():
        if key not in into:
            into[key] = metric
        elif type(into[key]) is not type(metric):
            raise TypeError(
                f"metric {key!r} is a {type(into[key]).__name__} in one place and a {type(metric).__name__} in another"
            )
        else:
            into[key] = into[key].merge(metric)  # type: ignore[arg-type]  # same kind, checked above


def host(metric: Metric) -> Metric:
    """The same metric with host numbers, which can be sent to other processes."""
    return type(metric)(*(float(getattr(metric, f.name)) for f in fields(metric)))


def to_json(metric: Metric) -> list[Any]:
    """Its kind and host numbers, fit for JSON."""
    return [type(metric).__name__, *(float(getattr(metric, f.name)) for f in fields(metric))]


def from_json(values: Sequence[Any]) -> Metric:
    """The metric that `to_json` wrote."""
    kinds = {kind.__name__: kind for kind in get_args(Metric)}
    metric: Metric = kinds[values[0]](*values[1:])
    return metric
