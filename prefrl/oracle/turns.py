"""Credit for turns, in an environment in which every token is a turn and the end token stops the episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from prefrl.losses.advantage.scored import centered, group_count, numbered
from prefrl.losses.advantage.tokens import to_go

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.oracle.exact import Samples
    from prefrl.oracle.recipe import PerToken

__all__ = ["centered_turns", "credit_of_turns"]


def credit_of_turns(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> PerToken:
    """Advantages of turns that have a reward each, [N].

    The reward of a turn is the rise of the critic's value, which is 0 before the first turn and the row's reward after
    the last one. So the turns of a row have different rewards, which add up to the row's reward.

    Args:
        function: `function(rewards, episode_index, groups)`, with its hyperparameters bound; the rewards and the
            result are [N].
    """

    def advantages(samples: Samples) -> Tensor:
        before = samples.values.where(~samples.is_last.roll(1), 0.0)
        after = samples.values.roll(-1).where(~samples.is_last, samples.rewards[samples.row_index])
        return function(after - before, samples.row_index, samples.groups)

    return advantages


def centered_turns(rewards: Tensor, episode_index: Tensor, groups: Tensor) -> Tensor:
    """[U] sum over the turns from t on of: the reward minus the mean of the other episodes that reach that turn.

    An example of bias: the number of means that are subtracted depends on when the episode itself stops. A turn that
    no other episode reaches has no mean.

    Args:
        rewards: [U] of the turns of all episodes, laid end to end.
        episode_index: [U] int64, episode of each turn.
        groups: [B] int64, group of each episode.
    """
    turn = torch.arange(len(rewards)) - torch.searchsorted(episode_index, episode_index)
    same_turn = numbered(groups[episode_index] * len(rewards) + turn)
    count = group_count(rewards, same_turn)[same_turn]
    without_own = centered(rewards, same_turn) * count / (count - 1).clamp(min=1)
    return to_go(without_own.where(count > 1, rewards), episode_index, discount=1.0)
