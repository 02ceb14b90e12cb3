"""Optional parts: the average of the weights, steps that grow, and Muon."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prefrl.errors import ConfigError
from prefrl.options.schedule import GrowthParams
from prefrl.trainer.features.averages import AveragedWeights, MovingAverage
from prefrl.trainer.features.growth import GrowingPlan, GrowthPlateau
from prefrl.trainer.optimizers import MuonWithAdamW, regroup
from prefrl.trainer.steps import StepPlan


def one_weight(value: float = 0.0, *, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def run_of(model: nn.Module) -> Any:
    return SimpleNamespace(policy=model, args=SimpleNamespace(should_save=True))


def begin(average: MovingAverage, model: nn.Module) -> None:
    run: Any = SimpleNamespace(state=SimpleNamespace(global_step=0), policy=model)
    average.begin(run)


def step(average: MovingAverage, model: nn.Linear, value: float, *, skipped: bool = False) -> None:
    nn.init.constant_(model.weight, value)
    run: Any = SimpleNamespace(optimizer=SimpleNamespace(step_was_skipped=skipped))
    average.after_step(run)


def value_of(average: MovingAverage, model: nn.Linear) -> float:
    assert average.average is not None
    with average.average.in_place():
        return model.weight.item()


def test_the_average_follows_its_formula_and_steps_that_are_left_out_do_not_count() -> None:
    model, average = one_weight(1.0), MovingAverage(decay=0.2)
    begin(average, model)
    step(average, model, 3.0)  # (1 + 1) / (10 + 1) = 2 / 11 < 0.2
    assert value_of(average, model) == pytest.approx(2 / 11 * 1 + 9 / 11 * 3)
    step(average, model, 99.0, skipped=True)
    step(average, model, 5.0)  # 3 / 12 > 0.2
    assert value_of(average, model) == pytest.approx(0.2 * (2 / 11 * 1 + 9 / 11 * 3) + 0.8 * 5)
    assert model.weight.item() == 5.0


def test_the_average_of_weights_in_bfloat16_is_kept_in_float32() -> None:
    model = one_weight(1.0, dtype=torch.bfloat16)
    average = AveragedWeights(model)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(10):
        average.mix(0.001)  # too little to change 1 in bfloat16
    assert average.state(keep=True)["weight"].item() == pytest.approx(2 - 0.999**10, abs=1e-6)
    average.put()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == torch.tensor(2 - 0.999**10).bfloat16().item()


def test_frozen_weights_are_left_out() -> None:
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    assert AveragedWeights(model).state(keep=True).keys() == {"weight"}


def test_a_resumed_average_goes_on_where_it_was(tmp_path: Path) -> None:
    model, average = one_weight(1.0), MovingAverage(decay=0.9)
    begin(average, model)
    step(average, model, 3.0)
    average.save(run_of(model), tmp_path)
    step(average, model, 4.0)
    expected = value_of(average, model)
    resumed = MovingAverage(decay=0.9)
    other = one_weight(3.0)
    resumed.load(run_of(other), tmp_path)
    step(resumed, other, 4.0)
    assert value_of(resumed, other) == expected


def test_a_resumed_run_may_begin_to_average(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, average = one_weight(7.0), MovingAverage(decay=0.9)
    average.load(run_of(model), tmp_path)
    assert value_of(average, model) == 7.0
    assert "the average of the weights starts with its weights" in caplog.text


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


def gradient(parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(parameter.numel()).reshape(parameter.shape) * (step + 1.0))


def test_each_weight_moves_as_with_its_own_optimizer() -> None:
    matrix, vector = (torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(shape)) for shape in ((3, 4), (12,)))
    both = MuonWithAdamW([matrix, vector], lr=0.1, adamw_lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), momentum=0.7)
    regroup(both, lambda parameter: both.muon_settings if parameter is matrix else {})
    other_matrix, other_vector = (torch.nn.Parameter(parameter.detach().clone()) for parameter in (matrix, vector))
    apart = [
        torch.optim.Muon([other_matrix], lr=0.1, weight_decay=0.2, momentum=0.7, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([other_vector], lr=0.01, weight_decay=0.2, betas=(0.8, 0.9)),
    ]
    for step in range(3):
        for parameter in (matrix, vector, other_matrix, other_vector):
            parameter.grad = gradient(parameter, step)
        for optimizer in (both, *apart):
            optimizer.step()
    assert torch.equal(matrix, other_matrix)
    assert torch.equal(vector, other_vector)
