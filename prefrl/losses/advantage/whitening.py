"""Whitening: normalize values to mean 0 and standard deviation 1 over the tokens of all ranks.

    total = moments(values, mask) of this rank, added up over ranks
    whitened(values, mask, mean=total.mean, std=total.std, ...)

`mask` selects the trainable tokens of rows that have a reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Moments", "moments", "whitened"]


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums as Python floats, which can be added over ranks and batches."""

    total: float
    square_total: float
    count: float

    def __add__(self, other: Moments) -> Moments:
        """The moments of both together."""
        return Moments(self.total + other.total, self.square_total + other.square_total, self.count + other.count)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The n-1 standard deviation; 0 if there are fewer than two values."""
        if self.count < 2:
            return 0.0
        # Rounding may make the difference negative where all values are equal.
        return math.sqrt(max(0.0, self.square_total - self.total * self.mean) / (self.count - 1))


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Sum, sum of squares and number of the values where `mask` is True, in float64.

    Args:
        values: [N].
        mask: [N] bool.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(values=values, mask=mask)
    chosen = values.detach()[mask].double()
    total, square_total = torch.stack([chosen.sum(), chosen.square().sum()]).tolist()
    return Moments(total, square_total, float(len(chosen)))


def whitened(
    values: Tensor, mask: Tensor, *, mean: float, std: float, shift_mean: bool, advantage_epsilon: float
) -> Tensor:
    """(values - mean) / (std + epsilon), plus mean if not `shift_mean`.

    A single value is its own mean and has std 0: it becomes 0, or stays unchanged without `shift_mean`.

    Args:
        values: [N].
        mask: [N] bool, the values over which `mean` and `std` were computed.
        mean: Over all ranks.
        std: Over all ranks.
        shift_mean: Whether the result has mean 0; else it keeps the mean of the values.
        advantage_epsilon: Added to `std`, positive.

    Returns:
        [N] in the dtype of `values`; 0 where `mask` is False.

    Raises:
        ValueError: Shapes differ, or epsilon is not positive.

    Source: Andrychowicz et al. 2021, arXiv 2006.05990 (advantage normalization)
    """
    check_same_shape(values=values, mask=mask)
    if advantage_epsilon <= 0:
        raise ValueError(f"advantage_epsilon={advantage_epsilon}: needs to be positive: equal values have std 0")
    result = (values - mean) / (std + advantage_epsilon)
    return (result if shift_mean else result + mean).where(mask, 0.0)
