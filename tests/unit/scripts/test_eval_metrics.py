"""The summaries of `prefrl eval`, against numbers worked out by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from prefrl.rewards.at_k import PromptSamples
from prefrl.scripts.eval import MeanWithInterval, default_sizes, evaluation_table, summaries

# Two prompts of one source with 1 of 2 and 2 of 2 correct, and one of another with 0 of 1.
PROMPTS = [
    PromptSamples("gsm8k", (1.0, 0.0), (True, False), ("4", "5")),
    PromptSamples("gsm8k", (1.0, 1.0), (True, True), ("6", "6")),
    PromptSamples("math", (0.0,), (False,), ("7",)),
]


def value(found: int | MeanWithInterval) -> float:
    assert isinstance(found, MeanWithInterval)
    assert found.low <= found.value <= found.high
    return found.value


def test_means_are_over_prompts_and_for_each_source() -> None:
    found = summaries(PROMPTS, [1, 2])
    assert list(found) == ["all", "gsm8k", "math"]
    assert (found["all"]["prompts"], found["all"]["responses"]) == (3, 5)
    assert value(found["all"]["reward"]) == pytest.approx(0.5)  # (1/2 + 1 + 0) / 3, and not 3/5
    assert value(found["gsm8k"]["reward"]) == pytest.approx(0.75)
    assert value(found["gsm8k"]["pass@2"]) == 1.0
    assert value(found["gsm8k"]["maj@2"]) == pytest.approx(
        0.75
    )  # a tie of a right and a wrong answer, and a right one
    assert value(found["math"]["reward"]) == 0.0
    assert "pass@2" not in found["math"]  # one response


def test_a_prompt_without_a_reward_is_left_out() -> None:
    found = summaries([PROMPTS[0], PromptSamples("", (), ())], [1])
    assert found["all"]["prompts"] == 1
    assert summaries([PromptSamples("", (), ())], [1]) == {"all": {"prompts": 0, "responses": 0}}


def test_the_interval_of_rewards_outside_0_and_1_may_leave_this_range() -> None:
    found = summaries([PromptSamples("", (r,), (False,)) for r in (-5.0, -3.0, -4.0)], [1])["all"]["reward"]
    assert isinstance(found, MeanWithInterval)
    assert -5 <= found.low < -4 < found.high <= -3


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_sizes_are_the_powers_of_two_up_to_the_most_responses(most: int, sizes: list[int]) -> None:
    assert default_sizes([PromptSamples("", (0.0,) * most, (False,) * most), PROMPTS[2]]) == sizes


def test_a_table_of_one_source_keeps_its_title_in_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(evaluation_table(summaries(PROMPTS[:1], [1]) | {"[b]": {}}))
    console.print(evaluation_table({"all": {"prompts": 1}}))
    lines = console.file.getvalue().splitlines()
    assert [line.strip() for line in lines].count("means over prompts, 95% intervals") == 2
    assert "[b]" in lines[2]
