"""Turn a judge that compares completions into a reward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards.base import RewardFunction

__all__ = ["PairwiseJudge", "get_judge_reward"]


class PairwiseJudge(Protocol):
    """Says which of two completions of a prompt is better."""

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> Sequence[int | None]:
        """For each prompt and its two completions: the index of the better one, 0 or 1, or None for neither."""
        ...


def get_judge_reward(judge: PairwiseJudge, *, num_generations: int) -> RewardFunction:
    """A reward: of the comparisons with the other completions of its prompt, the share that a completion wins.

    A comparison without a winner counts as half a win for both. All pairs of a prompt are judged in one call.

    Args:
        judge: Compares two completions.
        num_generations: Completions of each prompt, as in the config; at least 2.

    Raises:
        ConfigError: `num_generations` is below 2.
    """
    if num_generations < 2:
        raise ConfigError(f"num_generations={num_generations}: a judge compares at least 2 completions of a prompt")

    def judge_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        if len(completions) % num_generations:
            raise RewardError(
                f"judge_reward got {len(completions)} completions: needs a multiple of num_generations="
                f"{num_generations}. Give it the config's num_generations, also for evaluation."
            )
        rows = [
            (start + first, start + second)
            for start in range(0, len(completions), num_generations)
            for first, second in itertools.combinations(range(num_generations), 2)
        ]
        verdicts = judge(
            [prompts[first] for first, _ in rows],
            [(completions[first], completions[second]) for first, second in rows],
        )
        if len(verdicts) != len(rows):
            raise RewardError(f"the judge gave {len(verdicts)} verdicts on {len(rows)} pairs: needs one for each")
        wins = [0.0] * len(completions)
        for (first, second), verdict in zip(rows, verdicts, strict=True):
            if verdict not in (0, 1, None):
                raise RewardError(
                    f"the judge's verdict on rows {first} and {second} is {verdict!r}: needs 0, 1 or None"
                )
            share = 0.5 if verdict is None else 1.0 - verdict
            wins[first] += share
            wins[second] += 1.0 - share
        return [won / (num_generations - 1) for won in wins]

    return judge_reward
