"""The phases of a step, timed with a clock that the test advances."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.data.collate import flat_batch
from prefrl.losses.truncation import Truncation
from prefrl.metrics import Metric
from prefrl.models.flops import ModelCost, Products
from prefrl.models.forward import token_logprobs
from prefrl.models.reference import make_reference
from prefrl.models.scoring import prepare_for_scoring
from prefrl.trainer.features.flops import StepFlops
from prefrl.trainer.parts import Events, Parts
from prefrl.trainer.scorer import Scorer, Scores
from prefrl.trainer.steps import StepAccount
from tests.assets import ragged_batch, tiny_model

CPU = torch.device("cpu")


class Clock:
    """Stands still but for `wait`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        if seconds < 0:
            self.now += 1
            raise ValueError("negative")
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(clock: Clock) -> StepAccount:
    return StepAccount(CPU, clock=clock)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value() for name, metric in metrics.items()}


def test_an_inner_phase_is_not_part_of_the_outer_one(account: StepAccount, clock: Clock) -> None:
    account.start()
    clock.wait(1)
    with account.phase("backward"):
        clock.wait(2)
        with account.phase("forward"):
            clock.wait(4)
        clock.wait(8)
    clock.wait(16)
    account.finish()
    assert values(account.drain([])) == {
        "time/other_s": 17.0,
        "time/backward_s": 10.0,
        "time/forward_s": 4.0,
        "step_time": 31.0,
    }


def test_values_are_means_over_the_steps_since_the_last_log(account: StepAccount, clock: Clock) -> None:
    for seconds in (1.0, 3.0):
        account.start()
        if seconds == 3.0:
            with account.phase("generation"):
                clock.wait(8)
        clock.wait(seconds)
        account.finish()
        clock.wait(1000)  # between two steps
    assert values(account.drain([])) == {"time/other_s": 2.0, "time/generation_s": 4.0, "step_time": 6.0}
    account.start()
    clock.wait(5)
    account.finish()
    assert values(account.drain([])) == {"time/other_s": 5.0, "time/generation_s": 0.0, "step_time": 5.0}


def test_declared_phases_are_logged_before_they_are_met(account: StepAccount, clock: Clock) -> None:
    account.start()
    clock.wait(1)
    account.finish()
    logged = values(account.drain(["generation", "forward"]))
    assert logged == {"time/generation_s": 0.0, "time/forward_s": 0.0, "time/other_s": 1.0, "step_time": 1.0}


def test_what_is_outside_the_step_is_not_timed_whatever_runs_inside(account: StepAccount, clock: Clock) -> None:
    with account.phase("reference"):  # before the first step
        clock.wait(1000)
    account.start()
    clock.wait(1)
    with account.phase(None):
        clock.wait(1000)
        with account.phase("reference"):
            clock.wait(1000)
        clock.wait(1000)
    clock.wait(2)
    account.finish()
    account.finish()  # HuggingFace's loop comes by once more at the end of an epoch
    clock.wait(1000)
    assert values(account.drain([])) == {"time/other_s": 3.0, "step_time": 3.0}


def test_a_step_that_is_not_finished_is_forgotten(account: StepAccount, clock: Clock) -> None:
    account.start()
    with account.phase("forward"):
        clock.wait(1000)
    account.start()
    clock.wait(1)
    account.finish()
    assert values(account.drain([])) == {"time/other_s": 1.0, "step_time": 1.0}


def test_an_error_ends_its_phase(account: StepAccount, clock: Clock) -> None:
    account.start()
    with pytest.raises(ValueError, match="negative"), account.phase("forward"):
        clock.wait(-1)
    clock.wait(2)
    account.finish()
    assert values(account.drain([])) == {"time/forward_s": 1.0, "time/other_s": 2.0, "step_time": 3.0}


def test_the_optimizer_phase_ends_with_the_optimizers_step(account: StepAccount, clock: Clock) -> None:
    account.switch("optimizer")  # no step is under way
    account.start()
    clock.wait(1)
    account.switch("optimizer")
    clock.wait(2)
    run: Any = SimpleNamespace(parts=Parts(), account=account)
    Events(run, begin=account.start, end=account.finish).on_optimizer_step()
    clock.wait(4)
    account.finish()
    assert values(account.drain([])) == {"time/other_s": 5.0, "time/optimizer_s": 2.0, "step_time": 7.0}


def test_moved_seconds_change_the_phase_and_not_the_sum(account: StepAccount, clock: Clock) -> None:
    account.start()
    with account.phase("generation"):
        clock.wait(10)
        account.move("reward", 3.0)
    account.finish()
    logged = values(account.drain([]))
    assert logged == {"time/other_s": 0.0, "time/generation_s": 7.0, "time/reward_s": 3.0, "step_time": 10.0}


class Device:
    """Marks as a GPU's events: they come when the device gets there, and reading them earlier is an error."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0
        self.waits = 0

    def mark(self) -> Event:
        self.queued += 1
        return Event(self, self.queued)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.number = number

    def query(self) -> bool:
        return self.number <= self.device.done

    def synchronize(self) -> None:
        self.device.waits += not self.query()
        self.device.done = max(self.device.done, self.number)

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "read before it has come"
        return (end.number - self.number) * 1000


def test_no_step_waits_for_the_device_and_the_log_does(account: StepAccount) -> None:
    device = Device()
    account.new_mark = device.mark
    for _ in range(3):
        account.start()
        with account.phase("forward"):
            pass
        account.finish()
    assert device.waits == 0
    assert values(account.drain([])) == {"time/other_s": 2.0, "time/forward_s": 1.0, "step_time": 3.0}
    assert device.waits == 3


def test_steps_that_the_device_has_done_are_not_kept(account: StepAccount) -> None:
    """A run that never logs holds no more of them than the device is behind."""
    device = Device()
    account.new_mark = device.mark
    for step in range(50):
        device.done = 2 * step  # one step behind
        account.start()
        account.finish()
        assert len(account._waiting) <= 2
    assert values(account.drain([])) == {"time/other_s": 1.0, "step_time": 1.0}


# 2 operations for each token fed, 3 for each position, none for attention; twice that in backward.
COST = ModelCost(token=Products(2, 4), position=Products(3, 6), pair={}, scores_rows=False)


@pytest.fixture
def flops() -> StepFlops:
    return StepFlops(tiny_model(), COST)


def rows(group: int = 0) -> list[object]:
    """5 prompt tokens once, responses of 4 and 2: 9 tokens fed, 6 scored."""
    return [flat_batch([[7] * 5] * 2, [[1, 2, 3, 4], [1, 2]], groups=[group, group])]


def product() -> None:
    """240 operations."""
    torch.ones(4, 5) @ torch.ones(5, 6)


def test_operations_of_a_step_stand_beside_their_floor(clock: Clock, flops: StepFlops) -> None:
    account = StepAccount(CPU, clock=clock, flops=flops)
    for _ in range(2):
        account.start()
        product()  # generation
        with account.phase("backward", "training", rows()), account.phase("forward"):
            product()
            clock.wait(4)
        account.finish()
    floor = 3 * (9 * 2 + 6 * 3)
    logged = values(account.drain([]))
    assert logged["perf/flops"] == 240
    assert logged["perf/flops_floor"] == floor == 108
    assert logged["perf/step_efficiency"] == 108 / 240
    assert logged["perf/tflops_per_s"] == pytest.approx(240 / 4 / 1e12, rel=1e-12)


def test_passes_without_gradients_need_one_forward(clock: Clock, flops: StepFlops) -> None:
    flops.others["reference"] = ModelCost(token=Products(20, 40), position=Products(0, 0), pair={}, scores_rows=False)
    account = StepAccount(CPU, clock=clock, flops=flops)
    account.start()
    with account.phase("old_policy", "old_policy", rows()):
        clock.wait(2)
        product()
    with account.phase("reference", "reference", rows()):
        clock.wait(3)
        product()
    account.finish()
    logged = values(account.drain([]))
    assert logged["perf/flops_floor"] == (9 * 2 + 6 * 3) + 9 * 20
    assert logged["perf/flops"] == 480
    assert logged["perf/tflops_per_s"] == pytest.approx(480 / 5 / 1e12, rel=1e-12)
    assert logged["time/old_policy_s"] == 2
    assert logged["time/reference_s"] == 3


def test_a_prompt_in_several_micro_batches_is_needed_once(clock: Clock, flops: StepFlops) -> None:
    account = StepAccount(CPU, clock=clock, flops=flops)
    batch = flat_batch([[7] * 5] * 2, [[1, 2, 3, 4], [1, 2]], groups=[3, 3])
    account.start()
    with account.phase("backward", "training", batch.chunks(1)):
        product()
    account.finish()
    assert values(account.drain([]))["perf/flops_floor"] == 108


def test_a_pass_inside_another_is_counted_once(clock: Clock, flops: StepFlops) -> None:
    account = StepAccount(CPU, clock=clock, flops=flops)
    account.start()
    with account.phase("backward", "training", rows()):
        with account.phase("old_policy", "old_policy", rows()):
            product()
        product()
    account.finish()
    assert values(account.drain([]))["perf/flops"] == 480


def test_passes_outside_a_step_are_not_counted(clock: Clock, flops: StepFlops) -> None:
    account = StepAccount(CPU, clock=clock, flops=flops)
    with account.phase("backward", "training", rows()):
        product()
    account.start()
    with account.phase("backward", "training", rows()):
        product()  # of a step that is not finished
    account.start()
    with account.phase(None), account.phase("backward", "training", rows()):
        product()
    with account.phase("backward", "training", rows()):
        product()
    account.finish()
    logged = values(account.drain([]))
    assert logged["perf/flops"] == 240
    assert logged["perf/flops_floor"] == 108


def test_only_scores_that_were_needed_can_be_read() -> None:
    scores = Scores({"old_logprobs": torch.tensor([-1.0]), "values": torch.tensor([0.5])})
    assert scores.old_logprobs.item() == -1.0
    assert scores.values.item() == 0.5
    with pytest.raises(ValueError, match=r"ref_logprobs was not computed, only \['old_logprobs', 'values'\]"):
        scores.ref_logprobs  # noqa: B018


def test_every_pass_scores_the_distribution_that_is_sampled_from(tmp_path: Path) -> None:
    policy, other, batch = tiny_model(), tiny_model(seed=1), ragged_batch()
    prepare_for_scoring(policy)
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, temperature=0.5, top_k=9, repetition_penalty=1.5)
    cuts = Truncation(top_k=9, repetition_penalty=1.5)
    reference = make_reference(policy, beta=0.1, given=other)
    accelerator = SimpleNamespace(autocast=nullcontext)
    scorer = Scorer(args, accelerator, StepAccount(args.device), lambda: policy, reference)
    expected = token_logprobs(policy, batch, temperature=0.5, truncation=cuts).logprobs.detach()
    for other_way in ({"truncation": cuts}, {"temperature": 0.5}):
        assert not torch.allclose(expected, token_logprobs(policy, batch, **other_way).logprobs, atol=0.1)
    torch.testing.assert_close(scorer.scores(policy, batch, want=()).logprobs.detach(), expected)
    torch.testing.assert_close(scorer.of_policy(batch).logprobs, expected)
    expected = token_logprobs(other, batch, temperature=0.5, truncation=cuts).logprobs.detach()
    torch.testing.assert_close(scorer.of_reference(batch).logprobs, expected)
