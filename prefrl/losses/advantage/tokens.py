"""Token-level advantages: the rewards that follow a token, compared with a critic, the batch, or the group's rows.

The steps of a row are its trainable tokens. The policy did not choose the tokens of tools and environments, so they
are not steps, and nothing is read at them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefrl.losses.advantage.estimators import (
    Advantages,
    ScoredTokens,
    centered,
    check_finite,
    group_count,
    group_sum,
    numbered,
)
from prefrl.losses.per_token import check_same_shape
from prefrl.options.policy_gradient import BaselineParams, DiscountParams, GaeParams

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


def turn_advantages(
    rewards: Tensor, episode_index: Tensor, groups: Tensor, *, discount: float, epsilon: float | None = None
) -> Tensor:
    """Return from a turn on, minus the mean of the other episodes' returns from the same turn on.

    For turn t of episode i, with j over the n - 1 other episodes of the group that have a reward,

        A_it = R_it - sum_j R_jt / (n - 1),  R_it = sum_{s >= t} discount^(s - t) r_is

    and R_jt = 0 where episode j is over before turn t. The baseline depends on the turn and on the other episodes, not
    on when episode i stops. So with discount = 1 the gradient of the expected sum of rewards is unbiased, also where
    the policy decides when to stop. Rewards that are centered at each turn and then summed are biased there: an
    episode that goes on has one more mean subtracted.

    Episodes of one turn get the advantages of `rloo`. Where all returns from a turn on are equal, and in an episode
    that is alone in its group, the advantage is exactly 0. An episode with a NaN reward, or without turns, has no
    reward: it gets 0 and enters no baseline.

    With `epsilon`, A_it is divided by s + epsilon, where s is the standard deviation of the group's returns around the
    means of their turns, as `grpo` divides by that of the rewards: with T turns of the group's longest episode,

        s^2 = sum_jt (R_jt - mean_t)^2 / (T (n - 1))

    Args:
        rewards: [U] of the U turns of B episodes, laid end to end, the turns of an episode in order.
        episode_index: [U] int64, episode of each turn, in 0 .. B-1, never decreasing.
        groups: [B] int64, arbitrary ids; equal for the episodes of a prompt. Pass whole groups.
        discount: Factor on rewards for each turn that they come later.
        epsilon: Added to standard deviations before dividing by them; None: nothing is divided.

    Returns:
        [U] in the dtype of the rewards.

    Raises:
        ValueError: Shapes do not match, episodes are out of order or have no group, or a reward is infinite.

    Source: the leave-one-out baseline of Ahmadian et al. 2024, arXiv 2402.14740, at every turn instead of once for an
        episode. That ended episodes count as 0 is not from a paper; the gradient oracle shows what it does.
    """
    _check_turns(rewards, episode_index, groups)
    num_episodes, values = len(groups), rewards.detach().double()
    # Searching for its own number finds an episode's first turn.
    turn = torch.arange(len(values), device=values.device) - torch.searchsorted(episode_index, episode_index)
    num_turns = int(turn.max()) + 1 if len(turn) else 0
    returns = values.new_zeros(num_episodes, num_turns)
    returns[episode_index, turn] = to_go(values, episode_index, discount=discount)
    has_reward = torch.zeros_like(groups, dtype=torch.bool).index_fill(0, episode_index, True)
    has_reward = has_reward.index_fill(0, episode_index[values.isnan()], False)
    returns = returns.masked_fill(~has_reward[:, None], torch.nan).flatten()
    same_turn = (numbered(groups)[:, None] * num_turns + torch.arange(num_turns, device=groups.device)).flatten()
    count = group_count(returns, same_turn)[same_turn]
    deviations = centered(returns, same_turn)
    advantages = deviations * count / (count - 1).clamp(min=1)
    if epsilon is not None:
        has_turn = torch.zeros(num_episodes, num_turns, dtype=torch.bool, device=values.device)
        has_turn[episode_index, turn] = True
        advantages = advantages / (_deviation(deviations, has_turn & has_reward[:, None], same_turn) + epsilon)
    return advantages.view(num_episodes, num_turns)[episode_index, turn].nan_to_num(nan=0.0).to(rewards.dtype)


def _deviation(deviations: Tensor, has_turn: Tensor, same_turn: Tensor) -> Tensor:
    """[B T] standard deviation of each group's returns around the means of their turns.

    Args:
        deviations: [B T] from the mean of the turn; NaN without a reward.
        has_turn: [B, T] whether an episode with a reward has the turn.
        same_turn: [B T] int64, equal for the same turn of the episodes of a group: group * T + turn.
    """
    num_turns = has_turn.shape[1]
    # In a turn that no episode of the group has, nothing deviates and nothing is free to.
    is_played = torch.zeros_like(deviations).index_add(0, same_turn, has_turn.flatten().to(deviations.dtype)) > 0
    num_free = (group_count(deviations, same_turn) - 1).clamp(min=0) * is_played
    group = torch.div(torch.arange(len(deviations), device=deviations.device), num_turns, rounding_mode="floor")
    squares = group_sum(deviations.square(), same_turn)
    square, free = (torch.zeros_like(x).index_add(0, group, x) for x in (squares, num_free))
    return (square / free.clamp(min=1)).sqrt()[torch.div(same_turn, num_turns, rounding_mode="floor")]


def _check_turns(rewards: Tensor, episode_index: Tensor, groups: Tensor) -> None:
    check_same_shape(rewards=rewards, episode_index=episode_index)
    if rewards.dim() != 1 or groups.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)}: need to be [U] and [B]")
    if (episode_index.diff() < 0).any():
        raise ValueError("episode_index decreases: the turns of episodes need to be laid end to end in order")
    if len(episode_index) and not 0 <= int(episode_index[0]) <= int(episode_index[-1]) < len(groups):
        first, last = int(episode_index[0]), int(episode_index[-1])
        raise ValueError(f"episode_index from {first} to {last}: needs to be in 0 .. {len(groups) - 1}, as groups")
    check_finite(rewards)
