"""Every trainer logs the time of each phase of its steps and, with `log_flops`, the operations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.trainer.base_trainer import BaseTrainer
from tests.assets import tiny_model
from tests.contract.cases import (
    ONLINE,
    REPRESENTATIVES,
    Job,
    dataset_of,
    make_trainer,
    run_on_two_processes,
    update_of,
)

PHASES = {name: {"forward", "backward", "optimizer", "other"} for name in REGISTRY}
for _name in ("dpo", "kto", "bco", *ONLINE):
    PHASES[_name] |= {"reference"}
PHASES["kto"] |= {"old_policy"}
for _name in ONLINE:
    PHASES[_name] |= {"generation", "reward"}
for _name in ("rloo", "reinforce_plus_plus", "ppo"):
    PHASES[_name] |= {"old_policy"}


def logs_of(trainer: BaseTrainer) -> list[dict[str, float]]:
    """One for each logged step."""
    return [entry for entry in trainer.state.log_history if "step_time" in entry]


def phases_of(entry: dict[str, float]) -> dict[str, float]:
    return {key[len("time/") : -len("_s")]: value for key, value in entry.items() if key.startswith("time/")}


@pytest.mark.parametrize("name", REGISTRY)
def test_times_of_the_phases_sum_to_the_step_and_are_always_the_same(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, max_steps=4, logging_steps=2, logging_first_step=False)
    trainer.train()
    logs = logs_of(trainer)
    assert len(logs) == 2
    for entry in logs:
        phases = phases_of(entry)
        assert phases.keys() == PHASES[name]
        assert all(seconds > 0 for seconds in phases.values())
        assert sum(phases.values()) == pytest.approx(entry["step_time"], rel=1e-12)
        assert not [key for key in entry if key.startswith("perf/")]


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_counting_changes_no_update(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(name, tmp_path, log_flops=True, **options)
    assert torch.equal(update_of(trainer), update_of(make_trainer(name, tmp_path, **options)))
    for entry in logs_of(trainer):
        assert 0.5 < entry["perf/step_efficiency"] <= 1
        assert entry["perf/flops_floor"] / entry["perf/flops"] == pytest.approx(entry["perf/step_efficiency"])
        passes = set(phases_of(entry)) & {"forward", "backward", "reference", "old_policy"}
        seconds = sum(phases_of(entry)[phase] for phase in passes)
        assert entry["perf/tflops_per_s"] == pytest.approx(entry["perf/flops"] / seconds / 1e12)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"activation_checkpointing": True}),
    ("sft", {"freeze": ["embed", "layers.0"]}),
    ("sft", {"packing": True, "max_length": 48}),
    ("dpo", {"precompute_ref_log_probs": True}),
    ("dpo", {"loss_type": ["aot"]}),
    ("dpo", {"forward_plan": "packed"}),
    ("grpo", {"beta": 0.04, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}),
    ("grpo", {"max_tokens_per_micro_batch": 20}),
    ("reward", {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}),
    ("dpo", {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_no_step_does_with_less_than_the_floor(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, log_flops=True, **options)
    trainer.train()
    assert all(0.25 < entry["perf/step_efficiency"] <= 1 for entry in logs_of(trainer))


def test_sharing_prompts_is_what_the_floor_has(tmp_path: Path) -> None:
    shared, packed = (
        make_trainer("dpo", tmp_path, log_flops=True, forward_plan=plan) for plan in ("shared_prefix", "packed")
    )
    for trainer in (shared, packed):
        trainer.train()
    (with_sharing,), (without,) = logs_of(shared), logs_of(packed)
    assert with_sharing["perf/flops_floor"] == without["perf/flops_floor"]
    assert without["perf/flops"] > 1.2 * with_sharing["perf/flops"]


def test_precomputed_references_cost_nothing_in_the_step(tmp_path: Path) -> None:
    """A step with a reference costs four forwards, without three: attention's share of both is the same."""
    (with_reference,), (precomputed,) = (
        logs_of(trained(make_trainer("dpo", tmp_path, log_flops=True, precompute_ref_log_probs=precompute)))
        for precompute in (False, True)
    )
    assert "time/reference_s" not in precomputed
    assert precomputed["perf/flops_floor"] == pytest.approx(0.75 * with_reference["perf/flops_floor"], rel=1e-12)


def trained(trainer: BaseTrainer) -> BaseTrainer:
    trainer.train()
    return trainer


def test_first_use_checks_of_models_are_not_counted(tmp_path: Path) -> None:
    """The first step and a later one of the same rows."""
    trainer = trained(
        make_trainer("dpo", tmp_path, rows=8, log_flops=True, max_steps=2, train_sampling_strategy="sequential")
    )
    first, second = logs_of(trainer)
    assert first["perf/flops"] == second["perf/flops"]


def test_operations_of_all_processes_are_summed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_flops": True, "save_strategy": "steps", "save_steps": 1}
    (alone,) = logs_of(trained(make_trainer("dpo", tmp_path, log_flops=True)))
    run_on_two_processes([Job("dpo", {**options, "per_device_train_batch_size": 4}, tmp_path / "update.pt")])
    state = json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())
    together = state["log_history"][0]
    for key in ("perf/flops", "perf/flops_floor", "perf/step_efficiency"):
        assert together[key] == pytest.approx(alone[key], rel=1e-12), key
    assert sum(phases_of(together).values()) == pytest.approx(together["step_time"], rel=1e-12)


def test_what_cannot_be_counted_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_flops=True: .*experts run for some tokens only"):
        make_trainer("sft", tmp_path, model=tiny_model("mixtral"), log_flops=True)


class Clock:
    """Stands still where nothing moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def before(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The function, which now takes some time."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self.now += seconds
            return function(*arguments, **options)

        return slow


class Slow(TrainerCallback):
    """Takes time at every event of a step, and after it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.now += 1

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.clock.now += 0.5

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.now += 2

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.now += 4

    def on_log(self, *_: Any, **__: Any) -> None:
        self.clock.now += 1e6

    on_save = on_evaluate = on_epoch_end = on_log


def slow_grpo(tmp_path: Path, clock: Clock, callback: TrainerCallback, **options: Any) -> Any:
    """A trainer whose parts take 8, 32, 64, ... 512 seconds."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        clock.now += 8
        return [float(len(text)) for text in completions]

    trainer: Any = make_trainer("grpo", tmp_path, reward=reward, beta=0.1, callbacks=[callback], **options)
    trainer.account.clock = clock
    trainer.generator.generate = clock.before(trainer.generator.generate, 32)
    trainer.reference.scores = clock.before(trainer.reference.scores, 64)
    trainer.loss = clock.before(trainer.loss, 128)
    trainer.accelerator.backward = clock.before(trainer.accelerator.backward, 256)
    create = trainer.create_optimizer

    def create_slow(*arguments: Any, **named: Any) -> Any:
        optimizer = create(*arguments, **named)
        optimizer.step = clock.before(optimizer.step, 512)
        return optimizer

    trainer.create_optimizer = create_slow
    return trainer


def test_each_phase_has_what_belongs_to_it(tmp_path: Path) -> None:
    """Two micro-batches, one generation for each step; logs, saves and evaluations lie between the steps."""
    clock = Clock()
    trainer = slow_grpo(
        tmp_path,
        clock,
        Slow(clock),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_dataset=dataset_of("grpo", 2),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    for entry in logs_of(trainer):
        assert phases_of(entry) == {
            "generation": 32.0,
            "reward": 8.0,
            "reference": 64.0,
            "forward": 2 * 128.0,
            "backward": 2 * 256.0,
            "optimizer": 2.0 + 512.0,
            "other": 1.0 + 0.5 + 4.0,
        }


class EvaluateInStep(TrainerCallback):
    """An evaluation that a user's callback starts."""

    trainer: Any

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.evaluate(dataset_of("grpo", 2))


def test_an_evaluation_inside_a_step_is_not_part_of_it(tmp_path: Path) -> None:
    clock, callback = Clock(), EvaluateInStep()
    trainer = slow_grpo(tmp_path, clock, callback, log_flops=True)
    callback.trainer = trainer
    trainer.train()
    (entry,) = logs_of(trainer)
    assert entry["step_time"] == 32.0 + 8.0 + 64.0 + 128.0 + 256.0 + 512.0


def test_a_resumed_run_has_the_phases_that_it_meets_later(tmp_path: Path) -> None:
    several, one = (make_trainer("grpo", tmp_path, beta=0.1, steps_per_generation=steps) for steps in (2, 1))
    every = {"generation", "reward", "reference", "forward", "backward", "optimizer"}
    assert set(several.phases) == every | {"old_policy"}
    assert set(one.phases) == every
