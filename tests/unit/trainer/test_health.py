"""Runs whose rewards do not say which completions are better."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from prefrl import GRPOConfig
from prefrl.errors import RewardError
from prefrl.rollout.summary import SignalHealth
from prefrl.types import Completion, FinishReason, Rollout, Turn

NAN = float("nan")


def rollout(reward: float, advantage: float, finish_reason: FinishReason = "stop") -> Rollout:
    turn = Turn([7], Completion([5], finish_reason, [-1.0], [True], [0]))
    rewards = {"length": None if math.isnan(reward) else reward, "other": 1.0}
    return Rollout([turn], {}, group=0, rewards=rewards, reward=reward, advantage=advantage)


def health(folder: Path, **options: object) -> SignalHealth:
    return SignalHealth(GRPOConfig(output_dir=str(folder), use_cpu=True, report_to="none", **options))


GOOD = [rollout(1.0, 0.5), rollout(0.0, -0.5)]
WITHOUT_SIGNAL = [
    pytest.param(
        [rollout(1.0, 0.0), rollout(0.0, 0.0)],
        "completions that are compared have equal rewards",
        id="equal in a group",
    ),
    pytest.param(
        [rollout(1.0, 0.3), rollout(1.0, -0.2)],
        "completions that are compared have equal rewards",
        id="equal, with a critic",
    ),
    pytest.param([rollout(NAN, 0.0), rollout(NAN, NAN)], "100% got None from every reward", id="None"),
    pytest.param(
        [rollout(1.0, 0.5, "length"), rollout(0.0, 0.0)],
        "50% were cut off and masked by mask_truncated_completions: raise max_completion_length=256",
        id="cut off",
    ),
]


def signal_warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "no learning signal" in record.getMessage()]


def test_the_first_row_without_any_reward_is_shown_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unscored(number: int) -> Rollout:
        return replace(rollout(NAN, 0.0), row={"prompt": f"p{number}", "answer": None, "prompt_ids": [7]})

    watching = health(tmp_path)
    watching.check(GOOD)
    assert not caplog.records
    for number in (1, 2):
        watching.check([*GOOD, unscored(number)])
    (record,) = caplog.records
    assert "returned None for completions of this dataset row: {'prompt': 'p1', 'answer': None}" in record.getMessage()


@pytest.mark.parametrize(("rollouts", "reason"), WITHOUT_SIGNAL)
def test_steps_without_a_signal_are_warned_of_once(
    rollouts: list[Rollout], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = health(tmp_path, mask_truncated_completions=True)
    watching.check(rollouts)
    watching.check(GOOD)
    for _ in range(9):
        assert watching.check(rollouts)["health/signal_fraction"].value() == 0.0
    assert not signal_warnings(caplog)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            watching.check(rollouts)
        watching.end()
    (record,) = signal_warnings(caplog)
    assert "no learning signal in 10 consecutive optimizer steps. Of 20 completions, " in record.getMessage()
    assert reason in record.getMessage()


def test_a_run_that_is_shorter_than_the_window_is_warned_of_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for batches, num_warnings in ([GOOD[:1]], 1), ([GOOD, GOOD[:1]], 0), ([], 0):
        caplog.clear()
        watching = health(tmp_path)
        for batch in batches:
            watching.check(batch)
        watching.end()
        assert len(caplog.records) == num_warnings


def test_a_run_without_a_signal_can_be_stopped(tmp_path: Path) -> None:
    # A generation batch is learned from in 4 steps.
    watching = health(tmp_path, stop_without_signal=8, num_iterations=4)
    for batch in (GOOD[:1], GOOD, GOOD[:1]):
        watching.check(batch)
    with pytest.raises(RewardError, match=r"in 8 consecutive optimizer steps.*stop_without_signal=8 ends the run"):
        watching.check(GOOD[:1])


def test_completions_with_a_signal_and_those_without_a_reward_are_counted(tmp_path: Path) -> None:
    metrics = health(tmp_path).check([*GOOD, rollout(NAN, 0.0), rollout(0.0, 0.0)])
    values = {name: metric.value() for name, metric in metrics.items()}
    assert values == {"health/signal_fraction": 0.5, "rewards/length/none": 0.25, "rewards/other/none": 0.0}
