"""What the guard says about steps, what is said of rewards, and who hears which event."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.errors import RewardError
from prefrl.rollout.summary import SignalHealth
from prefrl.trainer.features.guard import Guard, StepGuard, has_problem
from prefrl.trainer.features.intervals import EpochIntervals
from prefrl.trainer.parts import Events, Part, Parts
from prefrl.types import Completion, FinishReason, Rollout, Turn
from tests.contract.cases import make_trainer

NAN, INF = float("nan"), float("inf")


def judge(guard: StepGuard, *numbers: tuple[float, float], may_overflow: bool = False) -> str | None:
    return guard.problem(numbers, may_overflow=lambda: may_overflow)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([(1.0, 2.0)], None),
        ([(NAN, 2.0)], "the loss is nan"),
        ([(1.0, INF)], "the gradient norm is inf"),
        ([(1.0, -1.0)], "the gradient norm is -1.0"),  # DeepSpeed's NaN
        ([(1.0, 2.0), (-INF, 2.0)], "the loss is -inf on process 1"),
    ],
)
def test_the_quantity_and_the_process_are_named(numbers: list[tuple[float, float]], expected: str | None) -> None:
    assert judge(StepGuard(1), *numbers) == expected


@pytest.mark.parametrize("loss", [1.0, NAN, INF, -INF])
@pytest.mark.parametrize("norm", [0.0, 2.0, NAN, INF, -1.0])
def test_the_device_finds_what_the_host_finds(loss: float, norm: float) -> None:
    for numbers in ([(loss, norm)], [(1.0, norm), (loss, norm)], [(1.0, norm, NAN, INF), (loss, norm, NAN, INF)]):
        found = StepGuard(1).problem(numbers, may_overflow=lambda: False)
        assert bool(has_problem(torch.tensor(numbers))) == (found is not None), numbers


def test_gradients_may_overflow_while_a_scale_is_searched_for_but_losses_may_not() -> None:
    assert judge(StepGuard(1), (1.0, INF), may_overflow=True) is None
    assert judge(StepGuard(1), (INF, INF), may_overflow=True) == "the loss is inf"


def test_patience_counts_steps_in_a_row() -> None:
    guard = StepGuard(2)
    states = []
    for loss in (NAN, 1.0, NAN, NAN):
        judge(guard, (loss, 1.0))
        states.append((guard.num_skipped, guard.is_exhausted))
    assert states == [(1, False), (1, False), (2, False), (3, True)]


def test_a_spike_is_measured_in_robust_deviations_of_the_finite_losses_before(tmp_path: Path) -> None:
    guard = StepGuard(1)
    for loss in (0, 1, 2, 3, 4, NAN, 5, 6, 7, 8):
        assert guard.spike([(loss, 1.0)]) == {}
    assert guard.spike([(9.0, 1.0)]) == {}  # of the ten before, one was not finite
    guard.save(tmp_path)
    restored = StepGuard(1)
    restored.load(tmp_path)
    # Median 4.5, median absolute deviation 2.5; the loss is the mean over processes.
    for each in (guard, restored):
        spike = each.spike([(40.0, 1.0), (42.0, 1.0)])["guard/loss_spike"]
        assert spike.value() == pytest.approx((41 - 4.5) / (1.4826 * 2.5))


def test_only_the_last_hundred_losses_count_and_equal_ones_say_nothing() -> None:
    guard = StepGuard(1)
    for loss in [1000.0] * 50 + [1.0] * 100:
        guard.spike([(loss, 1.0)])
    assert guard.spike([(5.0, 1.0)]) == {}  # 1.0 a hundred times
    for loss in (0.0, 2.0) * 50:
        guard.spike([(loss, 1.0)])
    spike = guard.spike([(4.0, 1.0)])["guard/loss_spike"]
    assert spike.value() == pytest.approx((4 - 1) / 1.4826)


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
        "those of each prompt got the same reward",
        id="equal in a group",
    ),
    pytest.param(
        [rollout(1.0, 0.3), rollout(1.0, -0.2)],
        "those of each prompt got the same reward",
        id="equal, with a critic",
    ),
    pytest.param(
        [rollout(NAN, 0.0), rollout(NAN, NAN)],
        "100% got None from every reward",
        id="None",
    ),
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


class Early(Part):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def begin(self, run: Any) -> None:
        self.heard.append(f"{type(self).__name__} begins")


class Late(Early):
    def ended(self, run: Any) -> None:
        self.heard.append(f"{type(self).__name__} ends")


def test_parts_hear_the_events_that_they_define_in_the_order_of_their_list() -> None:
    heard: list[str] = []
    parts = Parts([Early(heard)])
    parts.add(Late(heard))
    run: Any = SimpleNamespace(parts=parts)
    events = Events(run, begin=lambda: heard.append("the core begins"), end=lambda: heard.append("the core ends"))
    events.on_train_begin()
    events.on_epoch_end()  # which nobody hears
    events.on_train_end()
    assert heard == ["Early begins", "Late begins", "the core begins", "Late ends", "the core ends"]


def test_answers_come_in_the_same_order_and_a_part_that_is_off_is_said_to_be() -> None:
    class Says(Part):
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def may_save(self, run: Any) -> bool:
            return self.answer

    run: Any = None
    parts = Parts([Says(True), Part(), Says(False)])
    assert parts.tell("may_save", run) == [True, False]
    assert parts.other_weights(run) == []
    assert parts.get(Late) is None
    with pytest.raises(KeyError, match="Late"):
        parts[Late]


def test_a_run_without_options_has_no_part_but_the_guard(tmp_path: Path) -> None:
    plain = make_trainer("sft", tmp_path / "plain").parts
    assert [type(part) for part in plain._parts] == [Guard]
    by_epochs = make_trainer("sft", tmp_path / "epochs", save_strategy="epoch").parts
    assert [type(part) for part in by_epochs._parts] == [EpochIntervals, Guard]


def test_parts_of_models_hear_of_each_model_before_a_backend_and_a_later_part_is_around_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Around(Part):
        def __init__(self, name: str) -> None:
            self.name = name

        def made(self, run: Any, model: Any, role: str) -> None:
            heard.append(f"{self.name} {role}")

        def around_loss(self, run: Any, batch: Any, compute: Any) -> Any:
            heard.append(f"{self.name} begins")
            output = compute()
            heard.append(f"{self.name} ends")
            return output

    monkeypatch.setattr("prefrl.trainer.base_trainer.parts_of_models", lambda args, model: [Around("1"), Around("2")])
    trainer = make_trainer("dpo", tmp_path, max_steps=1)
    assert heard == ["1 policy", "2 policy", "1 reference", "2 reference"]
    trainer.train()
    assert heard[4:8] == ["2 begins", "1 begins", "1 ends", "2 ends"]
