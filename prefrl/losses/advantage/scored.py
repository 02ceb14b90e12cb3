"""Inputs and results of the advantage estimators, statistics over groups of completions of one prompt, and whitening.

Whitening normalizes values to mean 0 and standard deviation 1 over the tokens of all ranks.

    total = moments(values, mask) of this rank, added up over ranks
    whitened(values, mask, mean=total.mean, std=total.std, ...)

`mask` selects the trainable tokens of rows that have a reward.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prefrl.losses.per_token import check_same_shape


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of B rows or of their N tokens, and what is logged about them; in the dtype of the rewards."""

    values: Tensor  # [B] or [N]; 0 for rows without a reward and for tokens that are not trainable
    totals: Tensor  # [B] weighted sum of raw rewards, or sum of token rewards; NaN for rows without a reward
    returns: Tensor | None = None  # [N] regression targets of a critic; 0 where not trainable


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Input of row-level estimators. Statistics are taken over these B rows, so pass the rows of all ranks.

    A NaN reward means that the reward does not apply to its row: it enters no sum and no statistic. A row whose
    rewards are all NaN has no reward and gets advantage 0.

    Raises:
        ValueError: Shapes do not match, or a reward is infinite.
    """

    rewards: Tensor  # [B, K], NaN where a reward does not apply to a row
    weights: Tensor  # [K]
    groups: Tensor  # [B] int64, arbitrary ids; equal for the completions of a prompt
    lengths: Tensor  # [B] trainable tokens of each row
    greedy: Tensor | None = None  # [B] total reward of the greedy completion of the row's prompt

    def __post_init__(self) -> None:
        """Reject shapes that do not match and infinite rewards."""
        rows, rewards = self.rewards.shape[:1], self.rewards.shape[1:]
        per_row = {"groups": self.groups, "lengths": self.lengths}
        if self.greedy is not None:
            per_row["greedy"] = self.greedy
        if self.rewards.dim() != 2 or self.weights.shape != rewards or any(t.shape != rows for t in per_row.values()):
            shapes = {"rewards": self.rewards, "weights": self.weights, **per_row}
            named = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items())
            raise ValueError(f"{named}: need to be [B, K], [K] and [B]")
        check_finite(self.rewards)

    def totals(self) -> Tensor:
        """[B] float64, see `row_totals`."""
        return row_totals(self.rewards, self.weights)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Input of token-level estimators: N response tokens of whole rows and whole groups.

    Only trainable tokens are read. A row with a NaN reward at a trainable token has no reward: it gets advantage 0 and
    enters no statistic.

    Raises:
        ValueError: Shapes do not match, rows are not laid end to end, or a reward is infinite.
    """

    rewards: Tensor  # [N] reward of each token: the row's total on its last trainable token, minus KL terms
    trainable: Tensor  # [N] bool, tokens that have a loss
    row_index: Tensor  # [N] int64, row of each token, in 0 .. B-1, never decreasing
    num_rows: int  # B
    groups: Tensor  # [B] int64, arbitrary ids; equal for the completions of a prompt
    values: Tensor | None = None  # [N] the critic's value of the state in which the token was chosen
    logprobs: Tensor | None = None  # [N] nats, log pi_old
    log_collision: Tensor | None = None  # [N] nats, log sum p^2 over the vocabulary under pi_old
    # [N] nats, log of the importance weights that the loss is multiplied by: log pi_old - log mu, after any bound.
    log_ratio: Tensor | None = None

    def __post_init__(self) -> None:
        """Reject shapes that do not match, rows out of order and infinite rewards."""
        optional = {name: getattr(self, name) for name in ("values", "logprobs", "log_collision", "log_ratio")}
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        check_same_shape(rewards=self.rewards, trainable=self.trainable, row_index=self.row_index, **given)
        if self.groups.shape != (self.num_rows,):
            raise ValueError(f"groups {tuple(self.groups.shape)}: needs one entry for each of {self.num_rows} rows")
        if (self.row_index.diff() < 0).any():
            raise ValueError("row_index decreases: rows need to be laid end to end in order")
        check_finite(self.rewards)


def check_finite(rewards: Tensor) -> None:
    """Reject infinite rewards.

    Raises:
        ValueError: A reward is infinite.
    """
    if torch.isinf(rewards).any():
        raise ValueError("rewards contain an infinite value: each needs to be finite, or NaN for no reward")


def row_totals(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the non-NaN rewards of each row: R_b = sum_k w_k r_bk.

    Args:
        rewards: [B, K].
        weights: [K].

    Returns:
        [B] float64; NaN where all rewards are NaN.
    """
    rewards = rewards.detach().double()
    return (rewards * weights.double()).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def numbered(groups: Tensor) -> Tensor:
    """Renumber the groups to 0 .. B-1, as the functions below need; the partition of rows is unchanged."""
    numbers: Tensor = torch.unique(groups, return_inverse=True)[1]
    return numbers


def centered(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """[B] values minus the (weighted) mean of the non-NaN values of their group; NaN stays NaN.

    Equal values give exactly 0. Where all weights of a group are 0, its lowest value is used as the mean.
    """
    # Subtract the group's lowest value first, so that rounding cannot make equal values differ from their mean.
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, groups, values.nan_to_num(nan=torch.inf), "amin")
    shifted = values - lowest[groups]
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    weight_sums = group_sum(weights.masked_fill(values.isnan(), 0.0), groups)
    return shifted - (group_sum(weights * shifted, groups) / weight_sums.where(weight_sums > 0, 1.0))[groups]


def group_std(values: Tensor, groups: Tensor) -> Tensor:
    """[B] n-1 standard deviation of the non-NaN values in each row's group; 0 if there are fewer than two."""
    squares = group_sum(centered(values, groups).square(), groups)
    return (squares / (group_count(values, groups) - 1).clamp(min=1)).sqrt()[groups]


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of the non-NaN values of each group, indexed by group number."""
    return torch.zeros_like(values).index_add(0, groups, values.nan_to_num(nan=0.0))


def group_count(values: Tensor, groups: Tensor) -> Tensor:
    """Number of non-NaN values of each group, indexed by group number."""
    return torch.zeros_like(values).index_add(0, groups, (~values.isnan()).to(values.dtype))


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
