"""Rollouts as long as any that training can meet, of which nothing was sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import datasets

from prefrl import distributed
from prefrl.data.rows import list_lengths
from prefrl.errors import ConfigError
from prefrl.types import Completion, Rollout, Turn

if TYPE_CHECKING:
    from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig

__all__ = ["first_micro_batch", "longest_rollouts"]

Ready = TypeVar("Ready")

# How many times the rollouts of a micro-batch are made: some of them may have no gradient.
_FACTORS = (2, 4, 8, 16)


def longest_rollouts(
    args: PolicyGradientConfig, dataset: Any, reward_names: Sequence[str], *, num_rows: int
) -> list[Rollout]:
    """Whole groups with at least `num_rows` rollouts: the longest prompt, and completions of the maximal length.

    Rewards differ in a group, so that every rollout has an advantage.

    Args:
        args: Options.
        dataset: Prepared prompts; a stream has prompts of `max_prompt_length` tokens.
        reward_names: Names of the rewards.
        num_rows: Number of rollouts.

    Raises:
        ConfigError: The dataset is a stream, and prompts have no limit.
    """
    row = _longest_prompt(args, dataset)
    prompt_ids, length = list(row["prompt_ids"]), args.longest_completion
    num_groups = max(2, -(-num_rows // args.num_generations))
    first = distributed.rank() * num_groups  # numbers of groups are unique over all ranks
    rollouts = []
    for group in range(first, first + num_groups):
        for number in range(args.num_generations):
            completion = Completion(
                token_ids=[prompt_ids[-1]] * length,
                finish_reason="stop",
                logprobs=[-math.log(2.0)] * length,
                trainable=[True] * length,
                policy_versions=[0] * length,
            )
            reward = float(number % 2 if args.num_generations > 1 else group % 2)
            rollouts.append(
                Rollout(
                    turns=[Turn(prompt_ids, completion)],
                    row=row,
                    group=group,
                    rewards=dict.fromkeys(reward_names, reward),
                    reward=reward,
                    greedy_reward=0.5 if args.needs_greedy else math.nan,
                )
            )
    return rollouts


def first_micro_batch(micro_batches_of: Callable[[int], Sequence[Ready]], num_rows: int) -> Ready:
    """The first micro-batch of a minibatch that is large enough for it to be full.

    Args:
        micro_batches_of: The micro-batches of at least so many rollouts, some of which may have no gradient.
        num_rows: Rollouts of a micro-batch.
    """
    for factor in _FACTORS:
        micro_batches = micro_batches_of(factor * num_rows)
        if len(micro_batches) > 1:  # only the last one may be smaller than the others
            break
    return micro_batches[0]


def _longest_prompt(args: PolicyGradientConfig, dataset: Any) -> dict[str, Any]:
    if not isinstance(dataset, datasets.IterableDataset):
        return dict(dataset[int(list_lengths(dataset, "prompt_ids").argmax())])
    if args.max_prompt_length is None:
        raise ConfigError(
            "max_prompt_length=None with an IterableDataset: the longest prompt is not known, so sizes cannot be "
            "'auto'. Set max_prompt_length, or numbers."
        )
    return {**next(iter(dataset)), "prompt_ids": [0] * args.max_prompt_length}
