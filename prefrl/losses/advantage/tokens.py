"""Token-level advantages: the rewards that follow a token, compared with a critic, the batch, or the group's rows.

The steps of a row are its trainable tokens. The policy did not choose the tokens of tools and environments, so they
are not steps, and nothing is read at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.losses.advantage.scored import Advantages, ScoredTokens, centered, group_count, numbered
from prefrl.options.advantage import BaselineParams, DiscountParams, GaeParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "gae",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "to_go",
]

# exp(2 * 30) times any realistic number of tokens is finite in float32.
_MAX_LOG_RATIO = 30.0


def gae(scored: ScoredTokens, params: GaeParams) -> Advantages:
    """Generalized advantage estimation: A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t.

    After the last trainable token of a row, V and A are 0. The returns, the critic's targets, are A + V. In rows
    without a reward they equal V, so the critic has no error there.

    Args:
        scored: Needs `values`.
        params: gamma and lam.

    Returns:
        values [N] and returns [N].

    Raises:
        ValueError: `values` is missing.

    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16
    """
    if scored.values is None:
        raise ValueError("gae needs the values of a critic: values=None")
    steps = _steps(scored)
    values = steps.read(scored.values)
    delta = steps.rewards + params.gamma * _later_in_row(values, steps.row, 1) - values
    advantages = to_go(delta, steps.row, discount=params.gamma * params.lam).masked_fill(steps.rewards.isnan(), 0.0)
    return _result(scored, steps, advantages, returns=advantages + values)


def reinforce_plus_plus(scored: ScoredTokens, params: DiscountParams) -> Advantages:
    """Discounted rewards to go, A_t = sum_k gamma^k r_t+k. The caller whitens them, so the batch mean is the baseline.

    Args:
        scored: Its rewards include the KL terms of each token.
        params: gamma.

    Returns:
        values [N].

    Source: Hu et al. 2025, arXiv 2501.03262
    """
    steps = _steps(scored)
    return _result(scored, steps, to_go(steps.rewards, steps.row, discount=params.gamma))


def optimal_token_baseline(scored: ScoredTokens, params: BaselineParams) -> Advantages:
    """Rewards to go minus the minimum-variance baseline over the group's rows at the same step.

    With G_t the sum of rewards from step t on,

        A_t = G_t - B_t,  B_t = sum_G G_t W_t / sum_G W_t,  W_t = sum_{j <= t} rho_j^2 (1 - 2 p_j + sum_v p_jv^2)

    where sum_G is over the rows of the group that have a step t. The bracket is the squared norm of the gradient of
    log p_j with respect to the logits; rho are the importance weights, 1 without `log_ratio`.

    Args:
        scored: Needs `logprobs` and `log_collision`.
        params: `zero_tail`: what happens where only one row of a group has a step t. False: the row is its own
            baseline, so A_t = 0. True: the baseline is 0 there, so A_t = G_t.

    Returns:
        values [N].

    Raises:
        ValueError: `logprobs` or `log_collision` is missing.

    Source: Li et al. 2026, arXiv 2602.07078 (optimal token baseline, logit-gradient proxy)
    """
    if scored.logprobs is None or scored.log_collision is None:
        raise ValueError("optimal_token_baseline needs logprobs and log_collision")
    steps = _steps(scored)
    logprobs, log_collision = steps.read(scored.logprobs), steps.read(scored.log_collision)
    # (1 - p)^2 + (sum p^2 - p^2): both terms are non-negative and stay precise where p is close to 1.
    others = -log_collision.exp() * torch.expm1((2 * logprobs - log_collision).clamp(max=0))
    energy = torch.expm1(logprobs).square() + others
    if scored.log_ratio is not None:
        energy = energy * (2 * steps.read(scored.log_ratio).clamp(max=_MAX_LOG_RATIO)).exp()
    returns = to_go(steps.rewards, steps.row, discount=1.0)
    # A running sum is a sum to go over the reversed tokens.
    energy_so_far = to_go(energy.flip(0), steps.row.flip(0), discount=1.0).flip(0)
    step = torch.arange(len(returns), device=returns.device) - torch.searchsorted(steps.row, steps.row)
    same_step = numbered(numbered(scored.groups)[steps.row] * len(step) + step)
    advantages = centered(returns, same_step, energy_so_far)
    if params.zero_tail:
        advantages = torch.where(group_count(returns, same_step)[same_step] == 1, returns, advantages)
    return _result(scored, steps, advantages)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The M trainable tokens of all rows, laid end to end."""

    positions: Tensor  # [M] int64, in 0 .. N-1
    row: Tensor  # [M] int64
    rewards: Tensor  # [M]; NaN throughout a row if one of its rewards is NaN
    totals: Tensor  # [B]; NaN in rows without a reward or without a step

    def read(self, per_token: Tensor) -> Tensor:
        """[M] the values of a [N] tensor at the steps, detached."""
        return per_token.detach()[self.positions]


def _steps(scored: ScoredTokens) -> _Steps:
    positions = scored.trainable.nonzero().squeeze(1)
    row = scored.row_index[positions]
    rewards = scored.rewards.detach()[positions]
    totals = rewards.new_zeros(scored.num_rows).index_add(0, row, rewards)
    has_steps = torch.zeros_like(totals, dtype=torch.bool).index_fill(0, row, True)
    return _Steps(
        positions=positions,
        row=row,
        rewards=rewards.masked_fill(totals.isnan()[row], torch.nan),
        totals=totals.masked_fill(~has_steps, torch.nan),
    )


def to_go(values: Tensor, row: Tensor, *, discount: float) -> Tensor:
    """[M] sum_k discount^k values_t+k over the steps from t to the end of the row.

    Each round doubles the number of steps that a sum spans, so rows of T steps take log2(T) rounds.

    Args:
        values: [M] of the steps of all rows, laid end to end.
        row: [M] int64, row of each step.
        discount: Factor for each step that a value is later.
    """
    longest = int(torch.bincount(row).max()) if len(row) else 0
    sums, reach = values, 1
    while reach < longest:
        sums = sums + discount**reach * _later_in_row(sums, row, reach)
        reach *= 2
    return sums


def _later_in_row(values: Tensor, row: Tensor, distance: int) -> Tensor:
    """[M] the value `distance` steps later in the same row; 0 past the row's end."""
    following = torch.zeros_like(values)
    following[:-distance] = values[distance:].where(row[distance:] == row[:-distance], 0.0)
    return following


def _result(scored: ScoredTokens, steps: _Steps, values: Tensor, *, returns: Tensor | None = None) -> Advantages:
    """Scatter [M] values and returns back to [N]."""

    def spread(per_step: Tensor) -> Tensor:
        return torch.zeros_like(scored.rewards).index_copy(0, steps.positions, per_step.to(scored.rewards.dtype))

    return Advantages(
        values=spread(values.masked_fill(steps.rewards.isnan(), 0.0)),
        totals=steps.totals,
        returns=None if returns is None else spread(returns),
    )
