"""What is logged about rollouts."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from typing import get_args

import pytest
from rich.console import Console

from prefrl.metrics import merge
from prefrl.rollout import summary
from prefrl.rollout.collect import Collected
from prefrl.rollout.summary import (
    Tables,
    as_text,
    log_collected,
    log_completions,
    messages_of_turn,
    one_of_each_prompt,
    print_table,
    rollout_metrics,
    staleness,
    title_of_step,
)
from prefrl.types import Completion, Episode, FinishReason, Rollout, StopReason, Turn


def rollout(group: int, length: int, reward: float | None, finish: FinishReason = "stop") -> Rollout:
    completion = Completion([5] * length, finish, [-0.5] * length, [True] * length, [3] * length)
    total = float("nan") if reward is None else reward
    return Rollout([Turn([1, 2], completion)], {}, group, "[red]p", "c" * length, {"good": reward}, total, 0.25)


ROLLOUTS = [
    rollout(0, 2, 1.0),
    rollout(0, 4, 3.0),
    rollout(1, 6, 5.0, "length"),
    rollout(1, 8, 5.0),
    rollout(2, 1, None),
]


def test_metrics_by_hand() -> None:
    values = {name: metric.value() for name, metric in rollout_metrics(ROLLOUTS).items()}
    assert values["reward"] == pytest.approx(3.5)
    assert values["reward_std"] == pytest.approx((11 / 3) ** 0.5)  # of 1, 3, 5, 5
    assert values["reward_group_std"] == pytest.approx(2**0.5 / 2)  # groups: sqrt(2), 0; the third has no reward
    assert values["frac_reward_zero_std"] == 0.5
    assert values["frac_unscored"] == 0.2
    assert values["rewards/good/mean"] == pytest.approx(3.5)
    assert values["rewards/good/std"] == pytest.approx((11 / 3) ** 0.5)
    assert values["completions/mean_length"] == pytest.approx(21 / 5)
    assert (values["completions/min_length"], values["completions/max_length"]) == (1, 8)
    assert values["completions/mean_terminated_length"] == pytest.approx(15 / 4)
    assert values["completions/clipped_ratio"] == 0.2


def test_terminated_lengths_are_0_only_if_no_batch_has_a_terminated_completion() -> None:
    names = [f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max")]
    cut = rollout_metrics([rollout(0, 3, 1.0, "length")])
    assert [cut[name].value() for name in names] == [0.0] * 3
    merge(cut, rollout_metrics([rollout(0, 2, 1.0), rollout(0, 4, 1.0)]))
    assert [cut[name].value() for name in names] == [3.0, 2.0, 4.0]


def test_table_shows_markup_as_text() -> None:
    out = io.StringIO()
    print_table(ROLLOUTS[:2], title=title_of_step(4), console=Console(file=out, width=100))
    text = out.getvalue()
    assert "before step 5" in text
    assert "[red]p" in text


@pytest.mark.parametrize(
    ("limit", "unique", "shown"),
    [
        (4, False, [4, 7, 6, 5]),  # the best and the worst of a prompt; one of equal ones; the best of the third
        (None, False, [7, 2, 4, 6, 6, 5, 3, 1]),
        (2, True, [7, 6]),
    ],
)
def test_the_best_and_the_worst_completion_of_each_prompt_are_printed(
    limit: int | None, unique: bool, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {7: 0.0, 2: None, 4: 2.0}
    group = [rollout(0, length, reward) for length, reward in rewards.items()]
    equal, last = [rollout(1, 6, 1.0)] * 2, [rollout(2, 5, 1.0), rollout(2, 3, 0.5), rollout(2, 1, 0.0)]
    collected = Collected([*group, *equal, *last])
    log_collected(collected, step=1, limit=limit, unique=unique, tables=Tables([]))
    printed = capsys.readouterr().out
    assert [len(cell) for cell in re.findall(r" (c+) ", printed)] == shown


def test_one_completion_of_each_prompt_is_the_first_of_its_group() -> None:
    assert one_of_each_prompt(ROLLOUTS) == [ROLLOUTS[0], ROLLOUTS[2], ROLLOUTS[4]]


def spoken(text: str) -> list[Rollout]:
    return [replace(rollout(0, 2, 1.0), text=text)]


@pytest.mark.parametrize("text", ["\x1b]52;c;ZXZpbA==\x07", "\x9b2J", "\u202e", "a\x00b", "\ud800"], ids=ascii)
def test_a_completion_gives_the_terminal_no_commands(text: str) -> None:
    out = io.StringIO()
    print_table(spoken(text), title="Some", console=Console(file=out, width=100, force_terminal=True))
    assert text not in out.getvalue()
    assert text.encode("unicode_escape").decode() in out.getvalue()


def test_emoji_codes_are_not_replaced() -> None:
    out = io.StringIO()
    print_table(spoken(":smile: [/]"), title="Some", console=Console(file=out, width=100))
    assert ":smile: [/]" in out.getvalue()


@pytest.mark.parametrize("text", ["\n" * 20_000, "x" * 10**6])
def test_a_long_completion_is_cut_off_and_costs_little(text: str) -> None:
    out = io.StringIO()
    started = time.process_time()
    print_table(spoken(text), title="Some", console=Console(file=out, width=100))
    assert time.process_time() - started < 1
    assert len(out.getvalue()) < 20_000
    assert "more characters)" in out.getvalue()


def test_a_table_that_cannot_be_printed_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "Console", lambda: None)
    log_completions(ROLLOUTS, title=title_of_step(7))
    (record,) = caplog.records
    assert record.getMessage().startswith("Completions before step 8 could not be printed: AttributeError")


def played(num_turns: int, reason: StopReason, *, calls: int = 0, failed: int = 0) -> Rollout:
    (turn,) = rollout(0, 2, 1.0).turns
    episode = Episode("World", reason, [0.0] * num_turns, calls, failed)
    return replace(rollout(0, 2, 1.0), turns=[turn] * num_turns, episode=episode)


def test_metrics_of_episodes() -> None:
    episodes = [
        played(1, "stop"),
        played(3, "max_turns", calls=3, failed=1),
        played(2, "max_tokens", calls=1),
        played(1, "environment_error"),
    ]
    metrics = rollout_metrics(episodes)
    values = {name: metric.value() for name, metric in metrics.items()}
    assert values["tools/call_frequency"] == 1.0
    assert values["tools/failure_frequency"] == 0.25
    assert values["episodes/mean_turns"] == pytest.approx(7 / 4)
    assert (values["episodes/min_turns"], values["episodes/max_turns"]) == (1, 3)
    reasons = {name.rpartition("/")[2]: value for name, value in values.items() if "stop_reason" in name}
    assert reasons == dict.fromkeys(get_args(StopReason), 0) | dict.fromkeys(
        ["stop", "max_turns", "max_tokens", "environment_error"], 0.25
    )
    # What failed is not trained on: its length and its weights do not count.
    assert (values["completions/mean_length"], values["completions/max_length"]) == (4, 6)
    assert values["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert "episodes/mean_turns" not in rollout_metrics(ROLLOUTS)


def test_an_episode_that_failed_is_not_stale() -> None:
    failed = played(1, "environment_error")
    assert staleness([failed], step=9) == {}
    ages = staleness([failed, played(2, "stop")], step=9)
    assert (ages["sample/staleness_mean"].value(), ages["sample/staleness_max"].value()) == (6, 6)


def test_turns_are_shown_with_their_calls() -> None:
    call = {"function": {"name": "add", "arguments": {"a": "\u00e9"}}}
    said = [
        {"role": "assistant", "content": "well", "tool_calls": [call, call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": ""},
    ]
    assert as_text(said) == 'assistant: well add({"a": "\u00e9"}) add({"a": "\u00e9"})\ntool: 2\nassistant: '
    assert [messages_of_turn(said, turn) for turn in range(3)] == [said[:2], said[2:], []]
