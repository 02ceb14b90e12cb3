"""Trainers train with the schedule that the options name, and a resumed run goes on with it bit-exactly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from prefrl.errors import ConfigError
from prefrl.generation.local.generator import LocalGenerator
from tests.contract.cases import assert_same_weights, dataset_of, make_trainer, relative_difference

ONE_CYCLE = {"lr_scheduler_type": "one_cycle", "lr_scheduler_kwargs": {"pct_start": 0.5}}
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("sft", 4)}
# No value is 99 % better than the one before it.
PLATEAU = {"reduce_on_plateau": 2, "reduce_on_plateau_kwargs": {"patience": 1, "factor": 0.5, "threshold": 0.99}}


class Rates(TrainerCallback):
    """Learning rate and weight decay of each parameter group in each step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, float]]] = []

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.seen.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])


def test_a_critic_with_a_learning_rate_of_its_own_follows_in_proportion(tmp_path: Path) -> None:
    rates = Rates()
    options = {"max_steps": 6, "learning_rate": 0.1, "critic_learning_rate": 0.4, "weight_decay": 0.3}
    options |= {"weight_decay_schedule": "linear", "weight_decay_schedule_kwargs": {"start_factor": 0.5}}
    trainer = make_trainer("ppo", tmp_path, **ONE_CYCLE, **options, callbacks=[rates])
    trainer.train()
    # Half a cosine up to step 0.5 * 6 - 1 = 2, and down to step 5.
    factors = [0.04, 0.52, 1.0, 0.75 + 1e-6, 0.25 + 3e-6, 4e-6]
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([0.1 * factor for factor in factors], rel=1e-6)
    decays = {group[1] for group in rates.seen[0]}
    assert decays == {0.0, 0.15}  # of biases and norms, and of matrices
    for step, groups in enumerate(rates.seen):
        rate = 0.1 * factors[step]
        assert sorted({round(lr / rate, 4) for lr, _ in groups}) == [1.0, 4.0]
        assert {round(decay, 12) for _, decay in groups} == {0.0, round(0.15 + 0.15 * step / 6, 12)}


@pytest.mark.parametrize(
    ("metric", "kwargs"),
    [("eval_loss", {}), ("loss", {"window": 2, "patience": 0}), ("num_tokens", {"mode": "min", "patience": 1})],
)
def test_a_run_that_is_reduced_on_a_plateau_is_resumed_bit_exactly(
    metric: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """Also where the resumed run makes one more evaluation than the other: at its start."""
    kwargs = {**PLATEAU["reduce_on_plateau_kwargs"], "metric": metric, **kwargs}  # type: ignore[dict-item]
    options: dict[str, Any] = {**PLATEAU, "reduce_on_plateau_kwargs": kwargs, "lr_scheduler_type": "cosine"}
    options |= {
        **EVERY_STEP,
        "eval_on_start": True,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
    }
    whole, resumed = (make_trainer("sft", tmp_path, **options, rows=40) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (whole, resumed)]
    assert rates[0] == rates[1]
    plain_options = {**options, "reduce_on_plateau": 0, "reduce_on_plateau_kwargs": None}
    plain = make_trainer("sft", tmp_path / "plain", **plain_options, rows=40)
    scheduler = plain.create_optimizer_and_scheduler(8) or plain.lr_scheduler
    shares = [rate / (0.1 * scheduler.lr_lambdas[0](step)) for step, rate in enumerate(rates[0])]
    assert sorted({round(share, 9) for share in shares}) == [0.25, 0.5, 1.0]
    assert shares == sorted(shares, reverse=True)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("eval_lose", "an evaluation of the first rows has no metric 'eval_lose'. Did you mean 'eval_loss'"),
        ("lose", "is not among the metrics that are logged.*grad_norm"),
    ],
)
def test_a_metric_that_is_never_logged_is_an_error(metric: str, words: str, tmp_path: Path) -> None:
    kwargs = {"metric": metric, "mode": "min"}
    options = {**EVERY_STEP, "reduce_on_plateau": 1, "reduce_on_plateau_kwargs": kwargs, "max_steps": 3}
    with pytest.raises(ConfigError, match=f"metric='{metric}'.*{words}"):
        make_trainer("sft", tmp_path, **options).train()


def test_a_schedule_that_may_change_goes_on_at_the_same_step(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "weight_decay": 0.2}
    make_trainer("sft", tmp_path, **options, lr_scheduler_type="linear", weight_decay_schedule="linear").train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    changed = {"lr_scheduler_type": "exponential", "lr_scheduler_kwargs": {"decay_rate": 0.5, "decay_steps": 1}}
    allowed = ["lr_scheduler_type", "lr_scheduler_kwargs", "weight_decay_schedule", "max_steps", "num_train_epochs"]
    resumed = make_trainer("sft", tmp_path, **options, **changed, allow_resume_changes=allowed)
    resumed.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.1, 0.075, 0.025, 0.0125])
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.2}


@pytest.mark.parametrize(("max_steps", "first", "steps"), [(6, False, 6), (6, True, 4), (3, True, 3)])
def test_max_steps_overrides_epochs_unless_the_first_limit_ends_the_run(
    max_steps: int, first: bool, steps: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rows": 16, "per_device_train_batch_size": 8, "num_train_epochs": 2}
    options |= {"max_steps": max_steps, "stop_at_first_limit": first, "lr_scheduler_type": "linear"}
    trainer = make_trainer("sft", tmp_path, **options)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.1 * (1 - step / steps) for step in range(steps)])
    assert trainer.state.max_steps == trainer.state.global_step == steps


def test_training_with_a_schedule_that_does_not_know_its_length_is_extended_bit_exactly(tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "linear", "lr_decay_steps": 4, "warmup_steps": 0.5, "warmup_start_factor": 0.5}
    options = {**schedule, "save_strategy": "steps", "save_steps": 2, "rows": 40}
    make_trainer("sft", tmp_path, **options, max_steps=2).train()
    longer = make_trainer("sft", tmp_path, **options, max_steps=5)
    longer.train(resume_from_checkpoint=True)
    whole = make_trainer("sft", tmp_path / "whole", **options, max_steps=5)
    whole.train()
    assert whole.lr_scheduler.state_dict() == longer.lr_scheduler.state_dict()
    assert_same_weights(longer, whole)


def test_a_second_training_begins_without_reductions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {**PLATEAU["reduce_on_plateau_kwargs"], "metric": "loss"}  # type: ignore[dict-item]
    options = {**PLATEAU, "reduce_on_plateau_kwargs": kwargs, "max_steps": 5}
    trainer = make_trainer("sft", tmp_path, **options)
    for _ in range(2):
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05])
    told = [record.getMessage() for record in caplog.records if "does not improve" in record.getMessage()]
    assert told[0].startswith("step 3: loss does not improve; the learning rate is reduced, 1 of reduce_on_plateau=2")


def test_options_of_a_schedule_are_refused_with_a_scheduler_of_the_users_own(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = make_trainer("sft", tmp_path, lr_scheduler_type="wsd", optimizers=(optimizer, scheduler))
    with pytest.raises(ConfigError, match="was given a scheduler in optimizers"):
        trainer.train()


class Averaging(torch.optim.SGD):
    """Schedule-free SGD: y = 0.1 z + 0.9 x is trained, z -= lr * gradient(y), and x is the mean of all z."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.is_training = False

    def _move(self, fraction: float) -> None:
        """y = x + fraction (z - x), or back."""
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], fraction)

    def train(self) -> None:
        if not self.is_training:
            self._move(0.1)
        self.is_training = True

    def eval(self) -> None:
        if self.is_training:
            self._move(1 - 1 / 0.9)
        self.is_training = False

    def step(self, closure: Any = None) -> None:
        assert self.is_training
        self.eval()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("z", p.detach().clone()).sub_(p.grad, alpha=group["lr"])
                    state["count"] = state.get("count", 0) + 1
                    p.data.lerp_(state["z"], 1 / state["count"])
        self.train()


def averaging(algorithm: str, folder: Path, **options: Any) -> Any:
    trainer = make_trainer(algorithm, folder, **{"learning_rate": 0.05, "max_steps": 3} | options)
    trainer.optimizer = Averaging(trainer.model.parameters(), lr=0.05)
    return trainer


def weights_at(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.policy.parameters()])


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_evaluations_and_checkpoints_change_nothing_that_is_learned(algorithm: str, tmp_path: Path) -> None:
    plain = averaging(algorithm, tmp_path / "plain")
    plain.train()
    both = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    watched = averaging(algorithm, tmp_path / "watched", eval_dataset=dataset_of(algorithm, 4), **both)
    watched.train()
    assert relative_difference(weights_at(watched), weights_at(plain)) < 1e-5


def test_the_average_is_evaluated_saved_and_left_in_the_model(tmp_path: Path) -> None:
    trainer = averaging("sft", tmp_path, eval_dataset=dataset_of("sft", 4), save_strategy="steps", save_steps=3)
    trainer.train()
    assert not trainer.optimizer.optimizer.is_training
    average = weights_at(trainer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, dict(trainer.policy.named_parameters())[name])
    trainer.optimizer.train()
    assert relative_difference(weights_at(trainer), average) > 1e-4
    trainer.evaluate()
    assert relative_difference(weights_at(trainer), average) < 1e-6


def test_completions_come_from_the_weights_that_are_trained_and_those_of_evaluations_from_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("grpo", 4)}
    trainer = averaging("grpo", tmp_path, **options)
    sampled: list[bool] = []
    generate = LocalGenerator.start

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled.append(trainer.optimizer.optimizer.is_training)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(LocalGenerator, "start", noted)
    trainer.train()
    assert sampled == [True, False, False] * 3  # a step, and the two batches of an evaluation
