"""Row-level advantage estimators, and the table of all estimators.

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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from prefrl.losses.advantage.scored import (
    Advantages,
    ScoredRows,
    ScoredTokens,
    centered,
    group_count,
    group_std,
    group_sum,
    numbered,
    row_totals,
)
from prefrl.losses.advantage.tokens import gae, optimal_token_baseline, reinforce_plus_plus
from prefrl.options.policy_gradient import (
    ESTIMATOR_FACTS,
    AdvantageParams,
    GpgParams,
    GrpoParams,
    ScaleParams,
)

__all__ = [
    "ADVANTAGES",
    "AdvantageEstimator",
    "AdvantageParams",
    "Advantages",
    "ScoredRows",
    "ScoredTokens",
    "clip_advantages",
    "normalize_rows",
    "row_totals",
]


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
        return _result(scored, _divided(centered(totals, groups), totals, groups, params))
    rewards = scored.rewards.detach().double()
    per_reward = [centered(r, groups) / (group_std(r, groups) + params.advantage_epsilon) for r in rewards.unbind(1)]
    sums = row_totals(torch.stack(per_reward, 1), scored.weights)
    return _result(scored, sums / (group_std(sums, torch.zeros_like(groups)) + params.advantage_epsilon))


def rloo(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the mean reward of the other rows of the group: A = n / (n - 1) (R - mean).

    A row that is alone in its group has nothing to be compared with and gets 0.

    Source: Ahmadian et al. 2024, arXiv 2402.14740
    """
    totals, groups = scored.totals(), numbered(scored.groups)
    count = group_count(totals, groups)[groups]
    return _result(scored, centered(totals, groups) * count / (count - 1).clamp(min=1))


def reinforce_plus_plus_baseline(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the group mean, not divided by the group's std. The caller whitens it over the batch's tokens.

    Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262 (REINFORCE++-baseline)
    """
    return _result(scored, centered(scored.totals(), numbered(scored.groups)))


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
    return _result(scored, scored.totals() - scored.greedy.detach().double())


def opo(scored: ScoredRows, _: AdvantageParams) -> Advantages:
    """Reward minus the length-weighted mean of its group: R - sum(length R) / sum(length).

    This baseline has the least variance if the squared gradient norm of a row grows in proportion to its token count.

    Source: Hao et al. 2025 (OPO), arXiv 2505.23585
    """
    return _result(scored, centered(scored.totals(), numbered(scored.groups), scored.lengths))


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
    return _result(scored, centered(totals, groups) * num_rows / num_useful.clamp(min=1) / params.f_norm)


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
    return _result(scored, _divided(gap, totals, groups, params))


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
    return _result(scored, centered(totals, groups) / mean)


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


P = TypeVar("P", bound=AdvantageParams)


@dataclass(frozen=True, slots=True)
class AdvantageEstimator(Generic[P]):
    """A row of `ADVANTAGES`: `function(scored, params)` with `ScoredRows` or `ScoredTokens`; see `EstimatorFacts`."""

    function: Callable[[Any, P], Advantages]
    params: type[P]
    level: Literal["row", "token"]
    source: str
    whitened: bool
    needs: frozenset[str]


_FUNCTIONS: dict[str, Callable[[Any, Any], Advantages]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "maxrl": maxrl,
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "optimal_token_baseline": optimal_token_baseline,
}

ADVANTAGES: dict[str, AdvantageEstimator[Any]] = {
    name: AdvantageEstimator(function, **vars(ESTIMATOR_FACTS[name])) for name, function in _FUNCTIONS.items()
}


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


def _result(scored: ScoredRows, values: Tensor) -> Advantages:
    totals, dtype = scored.totals(), scored.rewards.dtype
    return Advantages(values=values.nan_to_num(nan=0.0).to(dtype), totals=totals.to(dtype))
