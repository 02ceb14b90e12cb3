"""Whitening: values over the tokens of all ranks get mean 0 and standard deviation 1.

    total = moments(values, mask) of this rank, added up over ranks
    whitened(values, mask, mean=total.mean, std=total.std, ...)

`mask` is the trainable tokens of rows that have a reward.
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
    """Host numbers that add up over ranks and batches."""

    total: float
    square_total: float
    count: float

    def __add__(self, other: Moments) -> Moments:
        """The moments of both together."""
        return Moments(self.total + other.total, self.square_total + other.square_total, self.count + other.count)

    @property
    def mean(self) -> float:
        """0 without a value."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """With n - 1 below the line; 0 if there are fewer than two values."""
        if self.count < 2:
            return 0.0
        # Rounding may leave a difference below 0 where all values are equal.
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
    """(values - mean) / (std + epsilon), plus mean unless it is shifted away.

    A single value, which is its own mean and has std 0, becomes 0, or stays as it is without `shift_mean`.

    Args:
        values: [N].
        mask: [N] bool, the values that `mean` and `std` are of.
        mean: Of all ranks.
        std: Of all ranks.
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
        raise ValueError(f"advantage_epsilon={advantage_epsilon}: needs to be positive, equal values have std 0")
    result = (values - mean) / (std + advantage_epsilon)
    return (result if shift_mean else result + mean).where(mask, 0.0)
