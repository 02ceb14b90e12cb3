"""Each option of schedules acts, or is refused where it would not."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl import SFTConfig, distributed
from prefrl.errors import ConfigError
from prefrl.options.base import BaseOptions
from prefrl.options.params import kwargs_options
from prefrl.registry import REGISTRY, Algorithm
from prefrl.trainer.facts import decisive_options
from prefrl.trainer.scheduler import refresh
from tests.unit.trainer.test_schedules import PLATEAU, RATES, VALUES, WSD, config, curve, optimizer_of, scheduler_of

# Option and choice -> options that it needs, and another value for each of its keys.
KEYS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("lr_scheduler_kwargs", "one_cycle"): (
        {"lr_scheduler_type": "one_cycle"},
        {"max_lr": 0.6, "pct_start": 0.5, "div_factor": 10.0, "final_div_factor": 2.0},
    ),
    ("lr_scheduler_kwargs", "exponential"): (
        {"lr_scheduler_type": "exponential", "lr_scheduler_kwargs": {"decay_steps": 5}},
        {"decay_rate": 0.5, "decay_steps": 3, "staircase": True},
    ),
    ("lr_scheduler_kwargs", "cosine_warm_restarts"): (
        {"lr_scheduler_type": "cosine_warm_restarts", "lr_scheduler_kwargs": {"t_0": 5}},
        {"t_0": 6, "t_mult": 2, "eta_min": 0.1},
    ),
    ("lr_scheduler_kwargs", "wsd"): (
        {**WSD, "lr_scheduler_kwargs": {"decay_fraction": 0.5}},
        {"warmup_fraction": 0.3, "decay_fraction": 0.8, "decay_type": "cosine", "min_lr_ratio": 0.1},
    ),
    ("reduce_on_plateau_kwargs", "True"): (
        {**PLATEAU, "reduce_on_plateau_kwargs": {"patience": 2}},
        {"mode": "max", "patience": 3, "factor": 0.5, "threshold": 0.9, "window": 2},
    ),
    ("weight_decay_schedule_kwargs", "linear, cosine"): (
        {"weight_decay": 0.1, "weight_decay_schedule": "cosine"},
        {"start_factor": 0.5, "end_factor": 0.5},
    ),
}


def trace(tmp_path: Path, **options: Any) -> list[list[float]]:
    """Learning rates and weight decays of each step."""
    optimizer = optimizer_of(*RATES, weight_decay=0.1)
    scheduler = scheduler_of(config(tmp_path, **options), optimizer)
    seen = []
    for value in VALUES:
        seen.append([number for group in optimizer.param_groups for number in (group["lr"], group["weight_decay"])])
        curve(optimizer, scheduler, 1)
        if scheduler.plateau is not None and scheduler.plateau.observe(value):
            refresh(scheduler)
    return seen


@pytest.mark.parametrize("place", KEYS, ids=".".join)
def test_each_key_acts(place: tuple[str, str], tmp_path: Path) -> None:
    option, (companions, keys) = place[0], KEYS[place]
    plain = trace(tmp_path, **companions)
    for key, value in keys.items():
        given = {**companions.get(option, {}), key: value}
        assert trace(tmp_path, **{**companions, option: given}) != plain, key


def test_every_key_is_listed() -> None:
    there = {
        (option.name, choice): {field.name for field in dataclasses.fields(params)}
        for option in kwargs_options(BaseOptions)
        if option.name in {"lr_scheduler_kwargs", "reduce_on_plateau_kwargs", "weight_decay_schedule_kwargs"}
        for choice, params in option.choices.items()
    }
    of_runs = {("reduce_on_plateau_kwargs", "True"): {"metric"}}  # tests/contract/test_schedules.py
    for (option, choices), (_, keys) in KEYS.items():
        for choice in choices.split(", "):
            found = there.pop((option, True if choice == "True" else choice))
            assert found == keys.keys() | of_runs.get((option, choices), set())
    assert not there


def test_schedules_go_with_optimizers_of_every_name(tmp_path: Path) -> None:
    assert config(tmp_path, **WSD, optim="adam").lr_scheduler_type == "wsd"


def test_a_warm_up_of_evaluations_counts_their_steps(tmp_path: Path) -> None:
    steps = {"eval_strategy": "steps", "warmup_evaluations": 3, "lr_scheduler_type": "constant_with_warmup"}
    assert config(tmp_path, **steps, eval_steps=4).get_warmup_steps(100) == 12


@pytest.mark.parametrize(
    ("options", "depends"),
    [
        ({"lr_scheduler_type": "constant"}, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, True),
        ({"lr_scheduler_type": "exponential"}, False),
        ({"lr_scheduler_type": "cosine_warm_restarts", "lr_scheduler_kwargs": {"t_0": 5}}, False),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 5}, False),
        ({"lr_scheduler_type": "linear"}, True),
        ({"lr_scheduler_type": "linear", "lr_decay_steps": 5, "warmup_steps": 0.2}, False),
        ({"lr_scheduler_type": "wsd"}, True),
        ({"lr_scheduler_type": "one_cycle"}, True),
        ({"lr_scheduler_type": "constant", "weight_decay": 0.1, "weight_decay_schedule": "linear"}, True),
    ],
    ids=str,
)
def test_training_can_be_extended_if_no_step_depends_on_its_length(
    options: dict[str, Any], depends: bool, tmp_path: Path
) -> None:
    made = config(tmp_path, **options)
    assert ("max_steps" in decisive_options(made)) == depends
    factors = [
        [(made.learning_rate_factor(n)(step), (made.weight_decay_factor(n) or float)(step)) for step in range(20)]
        for n in (20, 40)
    ]
    assert (factors[0] != factors[1]) == depends


REFUSED = [
    ({"lr_scheduler_type": "one_cycl"}, "lr_scheduler_type='one_cycl': unknown schedule. Did you mean 'one_cycle'?"),
    ({"lr_scheduler_type": "one_cycle", "lr_scheduler_kwargs": {"pct_start": 1.0}}, "pct_start=1.0: must be a number"),
    (
        {"lr_scheduler_type": "one_cycle", "max_steps": 10, "lr_scheduler_kwargs": {"pct_start": 0.1}},
        "pct_start=0.1 of 10 steps is a single step",
    ),
    ({"lr_scheduler_type": "one_cycle", "lr_scheduler_kwargs": {"t_0": 1}}, "t_0=1 is not known with lr_scheduler"),
    ({"lr_scheduler_type": "cosine_warm_restarts"}, "t_0=None with lr_scheduler_type='cosine_warm_restarts'. Set t_0"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps.*lr_scheduler_type='wsd' takes fractions"),
    ({"warmup_start_factor": 0.5}, "warmup_start_factor=0.5 has no effect because .*warmup_steps=0"),
    (
        {"lr_scheduler_type": "constant", "warmup_steps": 5, "warmup_start_factor": 0.5},
        "warmup_start_factor=0.5 has no effect because lr_scheduler_type='constant'",
    ),
    ({"warmup_evaluations": 2, "eval_strategy": "steps", "eval_steps": 0.2}, "eval_steps=0.2: needs evaluations at"),
    ({"weight_decay_schedule_kwargs": {"end_factor": 2.0}}, "weight_decay_schedule_kwargs=.* has no effect"),
    ({"reduce_on_plateau_kwargs": {"patience": 2}}, "has no effect because reduce_on_plateau=0. Set it to"),
    (
        {**PLATEAU, "lr_scheduler_type": "reduce_lr_on_plateau"},
        "reduce_on_plateau=2 with lr_scheduler_type='reduce_lr_on_plateau', which only follows a metric",
    ),
    ({**WSD, "optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"]}, "updates in the backward pass"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_options_that_contradict_or_do_nothing_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, strict_options=True, **options)


def test_a_config_is_made_again_from_its_values(tmp_path: Path) -> None:
    made = config(tmp_path, **WSD, warmup_start_factor=0.5)
    again = SFTConfig(**{name: made.to_dict()[name] for name in ("output_dir", "lr_scheduler_type", "use_cpu")})
    assert again.lr_scheduler_type == made.lr_scheduler_type == "wsd"
    assert list(itertools.islice(map(again.learning_rate_factor(20), range(20)), 3)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("part", ["scheduler", "optimizer"])
def test_schedules_are_refused_with_parts_of_deepspeeds_config(part: str) -> None:
    def with_config(config: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config)))

    distributed.check_chooses_schedule(with_config({"zero_optimization": {"stage": 2}}))
    distributed.check_chooses_schedule(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None)))
    with pytest.raises(ConfigError, match=f"DeepSpeed's config has {part} of its own"):
        distributed.check_chooses_schedule(with_config({part: {}}))


@pytest.mark.parametrize("row", REGISTRY.values(), ids=lambda row: row.name)
def test_a_field_of_a_config_is_that_of_the_first_class_that_declares_it(row: Algorithm) -> None:
    """A dataclass takes the fields of all its bases, also those that a base has from HuggingFace's class."""
    config = row.load_config()
    declared: dict[str, Any] = {}
    for group in reversed(config.__mro__):
        if group.__module__.startswith("prefrl."):
            fields = group.__dataclass_fields__
            declared |= {name: fields[name] for name in inspect.get_annotations(group) if name in fields}
    fields = config.__dataclass_fields__
    assert {name for name, field in declared.items() if fields[name].metadata != field.metadata} == set()
