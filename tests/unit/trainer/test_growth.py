"""Steps that take more than one planned step's data: positions, generation batches, and the end of training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.options.autopilot import GrowthParams
from prefrl.trainer.features.growth import GrowingPlan, GrowthPlateau
from prefrl.trainer.steps import StepPlan


def plan_of(*, factor: int, unit: int, total: int, per_epoch: int) -> GrowingPlan:
    args: Any = SimpleNamespace(
        increase_batch_size_on_plateau=1, growth_params=GrowthParams(), steps_of_a_generation=unit
    )
    plan = GrowingPlan(args)
    plan.start_at(0, total=total, per_epoch=per_epoch, checkpoint=None)
    plan.factor = factor
    return plan


def end_step(plan: StepPlan) -> Any:
    run: Any = SimpleNamespace(
        state=SimpleNamespace(epoch=0.0), optimizer=SimpleNamespace(step_was_skipped=True), lr_scheduler=None
    )
    plan.end_step()
    if isinstance(plan, GrowingPlan):
        plan.after_step(run)
    return run.state


def walk(plan: StepPlan) -> list[tuple[int, list[int]]]:
    """Items and generation batches of each step to the end."""
    steps: list[tuple[int, list[int]]] = []
    epoch = iter(range(plan.per_epoch))
    while plan.position < plan.total:
        left = plan.steps_left
        items = plan.next_items(epoch, 1)
        if not items:
            epoch = iter(range(plan.per_epoch))
            continue
        steps.append((len(items), list(plan.units)))
        state = end_step(plan)
        assert plan.steps_left == left - 1
        assert state.epoch == (plan.position / plan.per_epoch if isinstance(plan, GrowingPlan) else 0.0)
    return steps


@pytest.mark.parametrize(
    ("factor", "unit", "total", "per_epoch", "expected"),
    [
        (1, 1, 3, 2, [(1, [0]), (1, [1]), (1, [2])]),
        (1, 2, 5, 3, [(1, [0]), (1, [0]), (1, [1]), (1, [1]), (1, [2])]),
        # A step ends with its epoch, and with the training.
        (2, 1, 6, 3, [(2, [0, 1]), (1, [2]), (2, [3, 4]), (1, [5])]),
        (4, 1, 6, 9, [(4, [0, 1, 2, 3]), (2, [4, 5])]),
        # All steps of a generation batch learn from as many planned ones.
        (2, 2, 8, 8, [(2, [0, 1]), (2, [0, 1]), (2, [2, 3]), (2, [2, 3])]),
        (2, 2, 6, 6, [(2, [0, 1]), (2, [0, 1]), (1, [2]), (1, [2])]),
        (3, 4, 10, 40, [(3, [0, 1, 2])] * 3 + [(1, [0, 1, 2])]),
    ],
)
def test_a_grown_step_takes_the_data_of_several_planned_ones(
    factor: int, unit: int, total: int, per_epoch: int, expected: list[tuple[int, list[int]]]
) -> None:
    assert walk(plan_of(factor=factor, unit=unit, total=total, per_epoch=per_epoch)) == expected
    if factor == 1:
        plain = StepPlan(unit)
        plain.start_at(0, total=total, per_epoch=per_epoch, checkpoint=None)
        assert walk(plain) == expected


def test_a_plan_grows_only_between_generation_batches_and_goes_on_from_its_file(tmp_path: Path) -> None:
    plan = plan_of(factor=1, unit=2, total=10, per_epoch=10)
    plan.next_items(iter([0]), 1)
    end_step(plan)
    plan.factor = 2
    run: Any = SimpleNamespace(args=SimpleNamespace(should_save=True))
    plan.save(run, tmp_path)
    resumed = plan_of(factor=1, unit=2, total=10, per_epoch=10)
    resumed.start_at(1, total=10, per_epoch=10, checkpoint=tmp_path)
    assert list(resumed.units_left) == [1, 2, 3, 4]
    assert walk(resumed) == [(1, [0]), (2, [1, 2]), (2, [1, 2]), (2, [3, 4]), (2, [3, 4])]


def test_the_steps_of_a_long_run_are_not_counted_one_by_one() -> None:
    assert plan_of(factor=1, unit=4, total=10**18 + 1, per_epoch=3).steps_left == 10**18 + 1


@pytest.mark.parametrize(
    ("metric", "values", "reached"),
    [
        ("loss", [3.0, 2.0, 2.0, 2.5, 2.5, 2.5, 1.0], [False, False, False, True, False, True, False]),
        ("reward", [0.0, 1.0, 1.0, float("nan"), 2.0, 1.0, 2.0], [False, False, False, True, False, False, True]),
    ],
)
def test_a_plateau_is_a_number_of_values_without_an_improvement(
    metric: str, values: list[float], reached: list[bool]
) -> None:
    plateau = GrowthPlateau(GrowthParams(patience=2, eval_metric=metric, eval_split="validation"))
    for value, expected in zip(values, reached, strict=True):
        assert not plateau.is_reached({"loss": 0.0, metric: 0.0})
        assert plateau.is_reached({"eval_runtime": 1.0, f"eval_{metric}": value}) is expected


def test_a_metric_that_is_not_there_is_an_error() -> None:
    plateau = GrowthPlateau(GrowthParams(eval_metric="rewards"))
    assert not plateau.is_reached({"eval_runtime": 1.0})
    with pytest.raises(ConfigError, match=r"eval_metric='rewards' with eval_split='training'.*loss, reward"):
        plateau.is_reached({"loss": 1.0, "reward": 2.0})
