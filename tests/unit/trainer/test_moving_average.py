"""The moving average of the weights: its formula, its precision, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prefrl.trainer.features.averages import AveragedWeights, MovingAverage


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
