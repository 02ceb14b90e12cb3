"""What advantage estimators get and return, statistics over groups, and the estimators of rows.

The estimators of this module compare the total rewards of the completions of one prompt and return one advantage per
row. Those of `advantage.tokens` return one advantage per token.

R_b = sum_k w_k r_bk is the total reward of a row. Means are over the n rows of its group that have a reward, and
standard deviations divide by n - 1:

| name | advantage of a row |
|---|---|
| grpo | (R - mean) / (std of the group or the batch + epsilon), or R - mean |
| rloo | R - mean of the other rows of the group |
| reinforce_plus_plus_baseline | R - mean, whitened |
| remax | R - R of the greedy completion |
| opo | R - sum(length R) / sum(length) |
| gpg | (R - mean) * alpha / F, alpha = rows / rows in groups whose rewards differ |
| grpo_passk | R - second best for the best row only, 0 for the others; divided as in grpo |
| maxrl | (R - mean) / mean |

A row without a reward gets advantage 0 and enters no statistic. All estimators but `remax` give exactly 0 where the
rewards of a group are equal, and therefore also to a row that is alone in its group.

Whitening normalizes values to mean 0 and standard deviation 1 over the tokens of all ranks.

    total = moments(values, mask) of this rank, added up over ranks
    whitened(values, mask, mean=total.mean, std=total.std, ...)

`mask` selects the trainable tokens of rows that have a reward.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefrl.losses.per_token import check_same_shape
from prefrl.options.policy_gradient import AdvantageParams, GpgParams, GrpoParams, ScaleParams


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


def grpo(scored: ScoredRows, params: GrpoParams) -> Advantages:
    """Group-relative advantage: how much better a completion is than the others in its group.

    `sum_then_normalize`: with R_b = sum_k w_k r_bk,

        A_b = (R_b - mean_group) / (s + epsilon), s = std of the group ("group") or of the batch ("batch")
        A_b = R_b - mean_group ("none")

    `normalize_then_sum` (GDPO): each reward is normalized within its group, and their weighted sum within the batch,

        S_b = sum_k w_k (r_bk - mean_group_k) / (std_group_k + epsilon),  A_b = S_b / (std_batch(S) + epsilon)

    S needs no centering: its mean is 0 by construction.

    Args:
        scored: B rows.
        params: How to scale and aggregate, and epsilon. `normalize_then_sum` always divides by the group's std, then
            the batch's, so it allows only "group".

    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783
        ("none"); Liu et al. 2026 (GDPO), arXiv 2601.05242 (normalize_then_sum)
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    if params.multi_objective_aggregation == "sum_then_normalize":
        return _result(scored, totals, _divided(centered(totals, groups), totals, groups, params))
    rewards = scored.rewards.detach().double()
    per_reward = [centered(r, groups) / (group_std(r, groups) + params.advantage_epsilon) for r in rewards.unbind(1)]
    sums = row_totals(torch.stack(per_reward, 1), scored.weights)
    return _result(scored, totals, sums / (group_std(sums, torch.zeros_like(groups)) + params.advantage_epsilon))


def rloo(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the mean reward of the other rows of the group: A = n / (n - 1) (R - mean).

    A row that is alone in its group has nothing to be compared with and gets 0.

    Source: Ahmadian et al. 2024, arXiv 2402.14740
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    count = group_count(totals, groups)[groups]
    return _result(scored, totals, centered(totals, groups) * count / (count - 1).clamp(min=1))


def reinforce_plus_plus_baseline(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the group mean, not divided by the group's std. The caller whitens it over the batch's tokens.

    Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262 (REINFORCE++-baseline)
    """
    totals = scored.totals()
    return _result(scored, totals, centered(totals, numbered(scored.groups)))


def remax(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the reward of the greedy completion of the same prompt.

    Args:
        scored: Needs `greedy`. Where it is NaN there is no baseline, and the advantage is 0.

    Raises:
        ValueError: `greedy` is missing.

    Source: Li et al. 2023 (ReMax), arXiv 2310.10505
    """
    if scored.greedy is None:
        raise ValueError("remax needs the rewards of greedy completions: greedy=None")
    totals = scored.totals()
    return _result(scored, totals, totals - scored.greedy.detach().double())


def opo(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the length-weighted mean of its group: R - sum(length R) / sum(length).

    This baseline has the least variance if the squared gradient norm of a row grows in proportion to its token count.

    Source: Hao et al. 2025 (OPO), arXiv 2505.23585
    """
    totals = scored.totals()
    return _result(scored, totals, centered(totals, numbered(scored.groups), scored.lengths))


def gpg(scored: ScoredRows, params: GpgParams) -> Advantages:
    """Centered rewards, scaled up to make up for rows without a gradient: alpha (R - mean) / f_norm.

    alpha = rows / rows in groups whose rewards are not all equal, counted over the batch. It turns a mean over all
    rows into a mean over the rows that carry a gradient.

    Args:
        scored: B rows.
        params: The divisor.

    Source: Chu et al. 2025 (GPG), arXiv 2504.02546
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    num_rows, num_useful = (~totals.isnan()).sum(), (~totals.isnan() & (group_std(totals, groups) > 0)).sum()
    return _result(scored, totals, centered(totals, groups) * num_rows / num_useful.clamp(min=1) / params.f_norm)


def grpo_passk(scored: ScoredRows, params: ScaleParams) -> Advantages:
    """What each row adds to the best reward of its group: best minus second best for the best row, 0 for the others.

    This is the best reward of k samples minus the best reward without this sample. If several rows tie for the best,
    none of them adds anything.

    Args:
        scored: B rows.
        params: What the difference is divided by, as in `grpo`.

    Source: Tang et al. 2025, arXiv 2503.19595
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    best = _group_max(totals, groups)[groups]
    is_best = totals == best
    second = _group_max(totals.masked_fill(is_best, torch.nan), groups)[groups]
    is_only_best = is_best & (group_sum(is_best.to(totals.dtype), groups)[groups] == 1) & second.isfinite()
    gap = (best - second).where(is_only_best, 0.0)
    return _result(scored, totals, _divided(gap, totals, groups, params))


def maxrl(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """(R - mean) / mean. With rewards 0 and 1 this maximizes the log of the success rate, not the success rate.

    A group with mean 0 has no successful row and gets 0.

    Raises:
        ValueError: A total reward is negative.

    Source: Tajwar et al. 2026 (MaxRL), arXiv 2602.02710
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    if (totals < 0).any():
        raise ValueError(f"maxrl: a total reward is {float(totals.nan_to_num().min())}: all need to be >= 0")
    mean = (group_sum(totals, groups) / group_count(totals, groups).clamp(min=1))[groups]
    # Non-negative rewards with mean 0 are all 0. Here 0 / 0 gives NaN, which `_result` replaces by 0.
    return _result(scored, totals, centered(totals, groups) / mean)


def normalize_rows(advantages: Advantages, *, advantage_epsilon: float) -> Advantages:
    """Normalize row advantages to mean 0 and standard deviation 1 over the batch: (A - mean) / (std + epsilon).

    Args:
        advantages: `values` [B] of all ranks.
        advantage_epsilon: Added to the standard deviation.

    Returns:
        A copy with the normalized `values`; 0 for rows without a reward.
    """
    values = advantages.values.double().masked_fill(advantages.totals.isnan(), torch.nan)
    batch = torch.zeros_like(values, dtype=torch.long)
    values = centered(values, batch) / (group_std(values, batch) + advantage_epsilon)
    return replace(advantages, values=values.nan_to_num(nan=0.0).to(advantages.values.dtype))


def clip_advantages(values: Tensor, *, low: float, high: float) -> Tensor:
    """Clip advantages of any shape to `low` .. `high`.

    Raises:
        ValueError: The bounds exclude 0, which would give rows without a reward a gradient, or low = high.
    """
    if not low <= 0 <= high or low == high:
        raise ValueError(f"low={low}, high={high}: needs low <= 0 <= high and low < high")
    return values.clamp(low, high)


def _divided(values: Tensor, totals: Tensor, groups: Tensor, params: ScaleParams) -> Tensor:
    """[B] values / (standard deviation of the totals in their group or in the batch + epsilon)."""
    if params.scale_rewards == "none":
        return values
    over = groups if params.scale_rewards == "group" else torch.zeros_like(groups)
    return values / (group_std(totals, over) + params.advantage_epsilon)


def _group_max(values: Tensor, groups: Tensor) -> Tensor:
    """Largest non-NaN value of each group, indexed by group number; -inf where there is none."""
    lowest = torch.full_like(values, -torch.inf)
    return lowest.scatter_reduce(0, groups, values.nan_to_num(nan=-torch.inf), "amax")


def _result(scored: ScoredRows, totals: Tensor, values: Tensor) -> Advantages:
    dtype = scored.rewards.dtype
    return Advantages(values=values.nan_to_num(nan=0.0).to(dtype), totals=totals.to(dtype))
