"""Rollouts as long as any that training can meet, of which nothing was sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets

from prefrl import distributed
from prefrl.data.rows import list_lengths
from prefrl.errors import ConfigError
from prefrl.trainer.online.learner import Ready
from prefrl.types import Completion, Rollout, Turn

if TYPE_CHECKING:
    from prefrl.rollout.buffer import Minibatch
    from prefrl.trainer.online.config import PolicyGradientConfig

__all__ = ["LongestRollouts"]

# How many times the rollouts of a micro-batch are made: some of them may have no gradient.
_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class LongestRollouts:
    """Groups with the longest prompt and completions of the maximal length.

    Args:
        args: Options.
        dataset: Prepared prompts; a stream has prompts of `max_prompt_length` tokens.
        reward_names: Names of the rewards.
    """

    args: PolicyGradientConfig
    dataset: Any
    reward_names: Sequence[str]

    def micro_batch(self, num_rows: int, learn: Callable[[list[Rollout]], list[Minibatch[Ready]]]) -> Ready:
        """A full micro-batch, or the largest that some more rollouts give.

        Args:
            num_rows: Rollouts that a micro-batch starts from.
            learn: The minibatch of some rollouts, cut into micro-batches.
        """
        for factor in _FACTORS:
            (minibatch,) = learn(self.rollouts(factor * num_rows))
            if len(minibatch.micro_batches) > 1:  # only the last one may be smaller than the others
                break
        return minibatch.micro_batches[0]

    def rollouts(self, count: int) -> list[Rollout]:
        """Two or more whole groups with at least `count` rollouts. Rewards differ, so that they have advantages."""
        row, size = self._longest_prompt(), self.args.num_generations
        num_groups = max(2, -(-count // size))
        first = distributed.rank() * num_groups  # numbers of groups are unique over all ranks
        return [
            self._rollout(row, group, reward=float((number if size > 1 else group) % 2))
            for group in range(first, first + num_groups)
            for number in range(size)
        ]

    def _rollout(self, row: dict[str, Any], group: int, *, reward: float) -> Rollout:
        prompt_ids, length = list(row["prompt_ids"]), self.args.longest_completion
        completion = Completion(
            token_ids=[prompt_ids[-1]] * length,
            finish_reason="stop",
            logprobs=[-math.log(2.0)] * length,
            trainable=[True] * length,
            policy_versions=[0] * length,
        )
        return Rollout(
            turns=[Turn(prompt_ids, completion)],
            row=row,
            group=group,
            rewards=dict.fromkeys(self.reward_names, reward),
            reward=reward,
            greedy_reward=0.5 if self.args.needs_greedy else math.nan,
        )

    def _longest_prompt(self) -> dict[str, Any]:
        if not isinstance(self.dataset, datasets.IterableDataset):
            return dict(self.dataset[int(list_lengths(self.dataset, "prompt_ids").argmax())])
        if self.args.max_prompt_length is None:
            raise ConfigError(
                "max_prompt_length=None with an IterableDataset: the longest prompt is not known, so sizes cannot be "
                "'auto'. Set max_prompt_length, or numbers."
            )
        return {**next(iter(self.dataset)), "prompt_ids": [0] * self.args.max_prompt_length}
