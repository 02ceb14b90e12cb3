"""A judge as a reward."""

from __future__ import annotations

from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import get_judge_reward


def longer(prompts: Any, pairs: Any) -> list[int | None]:
    return [None if len(a) == len(b) else int(len(b) > len(a)) for a, b in pairs]


def test_the_reward_is_the_share_of_comparisons_won() -> None:
    reward = get_judge_reward(longer, num_generations=3)
    rewards = reward(prompts=["p"] * 3 + ["q"] * 3, completions=["a", "bbb", "cc", "x", "yy", "zz"])
    assert rewards == [0.0, 1.0, 0.5, 0.0, 0.75, 0.75]


def test_completions_of_one_prompt_are_compared_with_each_other_alone() -> None:
    asked: list[tuple[str, tuple[str, str]]] = []

    def first(prompts: Any, pairs: Any) -> list[int]:
        asked.extend(zip(prompts, pairs, strict=True))
        return [0] * len(pairs)

    get_judge_reward(first, num_generations=2)(prompts=["p", "p", "q", "q"], completions=["a", "b", "c", "d"])
    assert asked == [("p", ("a", "b")), ("q", ("c", "d"))]


@pytest.mark.parametrize(
    ("judge", "completions", "message"),
    [
        pytest.param(longer, ["a"] * 3, "multiple of num_generations=2", id="half a group"),
        pytest.param(lambda prompts, pairs: [], ["a", "b"], "0 verdicts on 1 pairs", id="no verdict"),
        pytest.param(lambda prompts, pairs: [2], ["a", "b"], "rows 0 and 1 is 2", id="unknown verdict"),
    ],
)
def test_what_a_judge_must_not_say(judge: Any, completions: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        get_judge_reward(judge, num_generations=2)(prompts=["p"] * len(completions), completions=completions)


def test_one_completion_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="num_generations=1"):
        get_judge_reward(longer, num_generations=1)
