"""Advantages of turns: for episodes in which each turn has a reward of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prefrl.losses.advantage.scored import centered, check_finite, group_count, group_sum, numbered
from prefrl.losses.advantage.tokens import to_go
from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["turn_advantages"]


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
