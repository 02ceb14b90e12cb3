"""What is logged about rollouts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from prefrl.rollout.summary import print_table, rollout_metrics
from prefrl.types import Completion, FinishReason, Rollout, Turn


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
    assert values["reward_std"] == pytest.approx(2**0.5 / 2)  # groups: sqrt(2), 0; the third has no reward
    assert values["frac_reward_zero_std"] == 0.5
    assert values["rewards/good/mean"] == pytest.approx(3.5)
    assert values["rewards/good/std"] == pytest.approx((11 / 3) ** 0.5)
    assert values["completions/mean_length"] == pytest.approx(21 / 5)
    assert (values["completions/min_length"], values["completions/max_length"]) == (1, 8)
    assert values["completions/mean_terminated_length"] == pytest.approx(15 / 4)
    assert values["completions/clipped_ratio"] == 0.2


def test_no_terminated_lengths_when_every_completion_was_cut() -> None:
    assert "completions/mean_terminated_length" not in rollout_metrics([rollout(0, 3, 1.0, "length")])


def test_table_shows_markup_as_text() -> None:
    out = io.StringIO()
    print_table(ROLLOUTS, step=4, limit=2, console=Console(file=out, width=100))
    text = out.getvalue()
    assert "before step 5" in text
    assert "[red]p" in text
    assert "cccccc" not in text  # the third row is beyond the limit
