"""What the guard of optimizer steps says about losses and gradient norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefrl.trainer.features.guard import StepGuard, has_problem

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
