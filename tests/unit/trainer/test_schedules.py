"""Every schedule follows its formula at each step, in proportion for all parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR, OneCycleLR, ReduceLROnPlateau
from transformers.trainer_utils import SchedulerType

from prefrl import SFTConfig, distributed
from prefrl.options.schedule import PlateauParams
from prefrl.trainer.facts import decisive_options
from prefrl.trainer.scheduler import SCHEDULES, RatePlateau, Scheduler, refresh

STEPS = 20
RATES = (0.3, 0.06)  # of two parameter groups, the first of learning_rate


def config(tmp_path: Path, **options: Any) -> SFTConfig:
    return SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **{"learning_rate": RATES[0], **options}
    )


def optimizer_of(*rates: float, weight_decay: float = 0.0) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD([*groups, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3, "weight_decay": 0}],
                           weight_decay=weight_decay)  # fmt: skip


def scheduler_of(options: SFTConfig, optimizer: torch.optim.Optimizer) -> Scheduler:
    scheduler = options.own_scheduler(None, optimizer, STEPS)
    assert scheduler is not None
    return scheduler


def curve(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int = STEPS) -> list[list[float]]:
    """For each step the learning rate of each group."""
    rates = []
    for _ in range(num_steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def one_cycle(step: int) -> float:
    """To 2 from 2 / 10 in 20 * 0.4 - 1 = 7 steps, to 2 / 10 / 100 in the 12 after them."""
    return cosine(0.2, 2.0, step / 7) if step <= 7 else cosine(2.0, 0.002, (step - 7) / 12)


def restarts(step: int) -> float:
    """After 2 steps of warm-up, cycles of 3, 6 and 12 steps down to 0.1."""
    if step < 2:
        return step / 2
    start, length = next((a, b) for a, b in ((2, 3), (5, 6), (11, 12)) if step < a + b)
    return cosine(1.0, 0.1, (step - start) / length)


def wsd(
    step: int, decay: Callable[[float], float], *, warmup: int = 2, stable: int = 14, lowest: float = 0.1
) -> float:
    if step < warmup:
        return step / warmup
    if step < warmup + stable:
        return 1.0
    return lowest + (1 - lowest) * decay((step - warmup - stable) / (20 - warmup - stable))


WSD: dict[str, Any] = {"lr_scheduler_type": "wsd"}
TAIL = {"decay_fraction": 0.2, "min_lr_ratio": 0.1}
CURVES: list[tuple[dict[str, Any], Callable[[int], float]]] = [
    (
        {
            "lr_scheduler_type": "one_cycle",
            "lr_scheduler_kwargs": {"max_lr": 0.6, "pct_start": 0.4, "div_factor": 10.0, "final_div_factor": 100.0},
        },
        one_cycle,
    ),
    (
        {"lr_scheduler_type": "exponential", "lr_scheduler_kwargs": {"decay_rate": 0.5, "decay_steps": 4}},
        lambda step: 0.5 ** (step / 4),
    ),
    (
        {
            "lr_scheduler_type": "exponential",
            "lr_scheduler_kwargs": {"decay_rate": 0.5, "decay_steps": 4, "staircase": True},
            "warmup_steps": 2,
        },
        lambda step: step / 2 if step < 2 else 0.5 ** ((step - 2) // 4),
    ),
    (
        {
            "lr_scheduler_type": "cosine_warm_restarts",
            "lr_scheduler_kwargs": {"t_0": 3, "t_mult": 2, "eta_min": 0.03},
            "warmup_steps": 2,
        },
        restarts,
    ),
    (WSD, lambda step: wsd(step, lambda p: 1 - p, stable=16, lowest=0)),
    (
        {**WSD, "lr_scheduler_kwargs": {**TAIL, "decay_type": "1-sqrt"}},
        lambda step: wsd(step, lambda p: 1 - math.sqrt(p)),
    ),
    (
        {**WSD, "lr_scheduler_kwargs": {**TAIL, "decay_type": "cosine"}},
        lambda step: wsd(step, lambda p: (1 + math.cos(math.pi * p)) / 2),
    ),
    (
        {**WSD, "lr_scheduler_kwargs": {**TAIL, "decay_type": "exponential"}},
        lambda step: wsd(step, lambda p: 2 ** (1 - p) - 1),
    ),
    (
        {**WSD, "lr_scheduler_kwargs": {"decay_fraction": 1.0, "min_lr_ratio": 0.1}, "warmup_steps": 5},
        lambda step: wsd(step, lambda p: 1 - p, warmup=5, stable=0),
    ),
    (
        {**WSD, "lr_scheduler_kwargs": {"warmup_fraction": 0.25}, "warmup_start_factor": 0.5},
        lambda step: 0.5 + 0.1 * step if step < 5 else wsd(step, lambda p: 1 - p, warmup=5, stable=13, lowest=0),
    ),
    (
        {"lr_scheduler_type": "linear", "warmup_steps": 4, "warmup_start_factor": 0.2},
        lambda step: 0.2 + 0.2 * step if step < 4 else (20 - step) / 16,
    ),
    (
        {"lr_scheduler_type": "cosine", "lr_decay_steps": 10},
        lambda step: cosine(1.0, 0.0, min(step, 10) / 10),
    ),
    # Arguments that are learning rates are those of learning_rate; the other group follows in proportion.
    (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.03}, "lr_decay_steps": 10},
        lambda step: 1.0 - 0.9 * min(step, 10) / 10,
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.03}, "lr_decay_steps": 10},
        lambda step: cosine(1.0, 0.1, min(step, 10) / 10),
    ),
]


@pytest.mark.parametrize(
    ("options", "formula"), CURVES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_schedule_follows_its_formula(
    options: dict[str, Any], formula: Callable[[int], float], tmp_path: Path
) -> None:
    optimizer = optimizer_of(*RATES)
    found = curve(optimizer, scheduler_of(config(tmp_path, **options), optimizer))
    for step, rates in enumerate(found):
        assert rates == pytest.approx([base * formula(step) for base in (*RATES, 0.3)], rel=1e-12, abs=1e-15), step


# 4 steps of warm-up, 16 after them.
OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant_with_warmup": ({}, lambda step: 1.0),
    "linear": ({}, lambda step: 1 - step / 16),
    "cosine": ({}, lambda step: cosine(1, 0, step / 16)),
    "cosine_with_min_lr": ({"min_lr_rate": 0.1}, lambda step: cosine(1, 0.1, step / 16)),
    "cosine_warmup_with_min_lr": (
        {"min_lr_rate": 0.1, "warmup_lr_rate": 0.0},
        lambda step: cosine(1, 0.1, (step + 1) / 16),
    ),
    "cosine_with_restarts": ({"num_cycles": 2}, lambda step: cosine(1, 0, step / 8 % 1)),
    "polynomial": ({"lr_end": 0.03, "power": 2.0}, lambda step: 0.1 + 0.9 * (1 - step / 16) ** 2),
    "inverse_sqrt": ({"timescale": 9}, lambda step: math.sqrt(9 / (step + 9))),
    "warmup_stable_decay": (
        {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.0},
        lambda step: 1.0 if step < 10 else 1 - math.sqrt((step - 10) / 6),
    ),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_schedule_of_transformers_follows_its_formula(name: str, tmp_path: Path) -> None:
    kwargs, formula = OF_TRANSFORMERS[name]
    made = config(tmp_path, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=4)
    # transformers has this one begin a step later.
    warm = [step / 3 for step in range(4)] if name == "cosine_warmup_with_min_lr" else [0.0, 0.25, 0.5, 0.75]
    found = [made.learning_rate_factor(STEPS)(step) for step in range(STEPS)]
    assert found == pytest.approx([*warm, *(formula(step) for step in range(16))], abs=1e-15)


def test_every_schedule_has_a_formula_here_and_on_its_page() -> None:
    here = {*OF_TRANSFORMERS, *(options["lr_scheduler_type"] for options, _ in CURVES), "constant"}
    following = {"reduce_lr_on_plateau", "greedy"}
    assert here | following == {*SCHEDULES, *(name.value for name in SchedulerType)}
    page = (Path(__file__).parents[3] / "docs/schedules.md").read_text(encoding="utf-8")
    table = page.partition("## Schedules")[2].partition("Factors in")[0]
    assert not [name for name in here | following if f"`{name}`" not in table]


def of_torch(make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    optimizer = optimizer_of(RATES[0])
    return [rates[0] for rates in curve(optimizer, make(optimizer))]


@pytest.mark.parametrize(
    ("name", "kwargs", "make"),
    [
        ("one_cycle", {}, lambda optimizer: OneCycleLR(optimizer, max_lr=RATES[0], total_steps=STEPS)),
        (
            "cosine_warm_restarts",
            {"t_0": 4, "t_mult": 3, "eta_min": 0.1},
            lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4, 3, 0.1),
        ),
        (
            "exponential",
            {"decay_rate": 0.9, "decay_steps": 1},
            lambda optimizer: ExponentialLR(optimizer, 0.9),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedule_of_torch_has_its_values(
    name: str, kwargs: dict[str, Any], make: Callable[[torch.optim.Optimizer], Any], tmp_path: Path
) -> None:
    optimizer = optimizer_of(RATES[0])
    options = config(tmp_path, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
    found = [rates[0] for rates in curve(optimizer, scheduler_of(options, optimizer))]
    assert found == pytest.approx(of_torch(make), rel=1e-12)


@pytest.mark.parametrize(("scaling", "factor"), [("sqrt", 2.0), ("linear", 4.0)])
def test_learning_rates_are_scaled_with_the_number_of_processes(
    scaling: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(tmp_path, learning_rate_scaling=scaling, lr_scheduler_type="constant")
    alone = decisive_options(options)
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    optimizer = optimizer_of(*RATES)
    assert curve(optimizer, scheduler_of(options, optimizer), 1)[0][:2] == [rate * factor for rate in RATES]
    assert decisive_options(options) != alone


# Reductions on a plateau.

PLATEAU: dict[str, Any] = {"reduce_on_plateau": 2, "eval_strategy": "steps", "eval_steps": 1}
VALUES = [3.0, 2.0, 2.1, 2.0, 1.9999, 2.5, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]


def reduced(options: SFTConfig, values: list[float]) -> list[list[float]]:
    """Learning rates of each step, with one value of the metric between two steps."""
    optimizer = optimizer_of(*RATES)
    scheduler = scheduler_of(options, optimizer)
    assert scheduler.plateau is not None
    rates = []
    for value in values:
        rates += curve(optimizer, scheduler, 1)
        if scheduler.plateau.observe(value):
            refresh(scheduler)
    return rates


@pytest.mark.parametrize("mode", ["min", "max"])
def test_reductions_come_when_torch_makes_them_and_multiply_the_schedule(mode: str, tmp_path: Path) -> None:
    values = VALUES if mode == "min" else [4.0 - value for value in VALUES]
    kwargs = {"patience": 2, "factor": 0.5, "threshold": 0.01, "mode": mode}
    options = config(tmp_path, **PLATEAU, reduce_on_plateau_kwargs=kwargs, lr_scheduler_type="linear")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    control = ReduceLROnPlateau(optimizer, mode=mode, patience=2, factor=0.5, threshold=0.01)  # type: ignore[arg-type]
    factors = [1.0]
    for value in values[:-1]:
        control.step(value)
        factors.append(max(control.get_last_lr()[0], 0.25))  # two reductions at most
    assert sorted(set(factors)) == [0.25, 0.5, 1.0]
    for step, (rates, factor) in enumerate(zip(reduced(options, values), factors, strict=True)):
        expected = [base * factor * (20 - step) / 20 for base in (*RATES, 0.3)]
        assert rates == pytest.approx(expected, rel=1e-12), step


def test_a_window_averages_values(tmp_path: Path) -> None:
    kwargs = {"patience": 0, "factor": 0.5, "window": 2}
    options = config(tmp_path, **PLATEAU, reduce_on_plateau_kwargs=kwargs, lr_scheduler_type="constant")
    # Means 2, 1.5 and 2.
    rates = [rates[0] / RATES[0] for rates in reduced(options, [1.0, 3.0, 2.5, 0.5, 0.0, 4.0, 0.0])]
    assert rates == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]


def test_a_plateau_goes_on_from_its_state(tmp_path: Path) -> None:
    kwargs = {"patience": 2, "factor": 0.5, "window": 2}
    options = config(tmp_path, **PLATEAU, reduce_on_plateau_kwargs=kwargs, lr_scheduler_type="cosine")
    values = [1.0, 1.1, *(2.0 + 0.1 * step for step in range(16))]
    whole = reduced(options, values)
    assert whole[-1] == pytest.approx([rate * 0.25 * cosine(1, 0, 17 / 20) for rate in (*RATES, 0.3)])
    for stop in range(1, len(values)):
        first, second = optimizer_of(*RATES), optimizer_of(*RATES)
        before = scheduler_of(options, first)
        for value in values[:stop]:
            curve(first, before, 1)
            if before.plateau is not None and before.plateau.observe(value):
                refresh(before)
        after = scheduler_of(options, second)
        second.load_state_dict(first.state_dict())
        after.load_state_dict(before.state_dict())
        assert after.plateau is not None
        rates = []
        for value in values[stop:]:
            rates += curve(second, after, 1)
            if after.plateau.observe(value):
                refresh(after)
        assert rates == whole[stop:]


@pytest.mark.parametrize(
    ("mode", "values"), [("max", [-2.0, -2.0001, -2.0, -1.9]), ("min", [-2.0, -1.9999, -2.0, -2.1])]
)
def test_negative_values_that_stay_or_get_worse_are_no_improvement(mode: str, values: list[float]) -> None:
    """torch's ReduceLROnPlateau takes -2.0001 for more than -2: its threshold is -2 * 1.0001."""
    plateau = RatePlateau(PlateauParams(mode=mode, patience=1), most=5)  # type: ignore[arg-type]
    assert [plateau.observe(value) for value in values] == [False, False, True, False]


def test_values_that_are_not_numbers_are_no_improvement() -> None:
    plateau = RatePlateau(PlateauParams(patience=2), most=5)
    assert [plateau.observe(value) for value in (math.nan, 1.0, math.nan, math.nan, 2.0)] == [*[False] * 4, True]


# Weight decay.


@pytest.mark.parametrize(
    ("kind", "share"),
    [("linear", lambda p: p), ("cosine", lambda p: (1 - math.cos(math.pi * p)) / 2)],
    ids=["linear", "cosine"],
)
def test_the_weight_decay_follows_its_formula(kind: str, share: Callable[[float], float], tmp_path: Path) -> None:
    options = config(
        tmp_path,
        weight_decay=0.2,
        weight_decay_schedule=kind,
        weight_decay_schedule_kwargs={"start_factor": 0.5, "end_factor": 2.0},
        lr_decay_steps=10,
    )
    optimizer = optimizer_of(*RATES, weight_decay=0.2)
    scheduler = scheduler_of(options, optimizer)
    for step in range(STEPS):
        expected = 0.2 * (0.5 + 1.5 * share(min(step / 10, 1.0)))
        found = [group["weight_decay"] for group in optimizer.param_groups]
        assert found == pytest.approx([expected, expected, 0.0], rel=1e-12), step
        curve(optimizer, scheduler, 1)
