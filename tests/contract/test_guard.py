"""A step whose numbers are not finite is not applied, and weights that are not finite are not saved."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from prefrl import distributed
from prefrl.errors import NonFiniteError
from prefrl.run.checkpoints import find_last
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.features import guard as guards
from prefrl.trainer.features.averages import MovingAverage
from prefrl.trainer.features.guard import Guard
from tests.contract.cases import make_trainer, weights_of

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


class Breaks(TrainerCallback):
    """Puts NaN into something in some steps, counted from 1, and notes what each step has changed."""

    def __init__(self, trainer: Any, what: str, steps: tuple[int, ...]) -> None:
        self.trainer, self.what, self.steps = trainer, what, steps
        self.is_broken = False
        self.before: Any = None
        self.changed: list[list[str]] = []  # for each step
        loss = trainer.loss
        trainer.loss = lambda model, batch: self.loss(loss(model, batch))
        next(p for p in trainer.policy.parameters() if p.requires_grad).register_hook(self.gradient)
        trainer.add_callback(self)

    def loss(self, output: Any) -> Any:
        if self.is_broken and self.what == "loss":
            object.__setattr__(output, "total", output.total + math.nan)
        return output

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.is_broken and self.what == "gradient":
            gradient = gradient.clone()
            gradient.flatten()[7] = math.inf
        return gradient

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "weights": weights_of(trainer.model),
            "optimizer": copy.deepcopy(trainer.optimizer.state_dict()["state"]),
            "schedule": trainer.lr_scheduler.last_epoch,
        }

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.is_broken = state.global_step + 1 in self.steps
        self.before = self.state()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        after = self.state()
        names = [name for name in after if not same(after[name], self.before[name])]
        self.changed.append(names)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def losses(trainer: BaseTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


EVERYTHING = ["weights", "optimizer", "schedule"]


# With torch's fused AdamW, the device leaves out an update, and the host knows of it afterwards.
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_changes_nothing_and_the_next_ones_train_on(
    what: str, max_grad_norm: float, optim: str, tmp_path: Path
) -> None:
    options = {"optim": optim, "lr_scheduler_type": "linear", "learning_rate": 1e-3}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_grad_norm": max_grad_norm}
    trainer = make_trainer("sft", tmp_path, max_steps=4, on_nan="skip", **options)
    breaks = Breaks(trainer, what, (2,))
    trainer.train()
    assert breaks.changed == [EVERYTHING, [], EVERYTHING, EVERYTHING]
    assert [math.isnan(loss) for loss in losses(trainer)] == [False, what == "loss", False, False]
    skipped = [entry["guard/skipped_steps"] for entry in trainer.state.log_history if "loss" in entry]
    assert skipped == [0, 1, 1, 1]


@pytest.mark.parametrize(("algorithm", "optim"), [("grpo", "sgd"), ("ppo", "adamw_torch_fused"), ("dpo", "sgd")])
def test_training_stops_with_the_weights_before_the_step_on_the_disk(
    algorithm: str, optim: str, tmp_path: Path
) -> None:
    trainer = make_trainer(algorithm, tmp_path, **SAVING, max_steps=4, save_total_limit=1, optim=optim)
    breaks = Breaks(trainer, "loss", (3,))
    with pytest.raises(NonFiniteError, match=r"step 3: the loss is nan\. .* kept in .*nan-step-3"):
        trainer.train()
    assert breaks.changed[2] == []
    assert math.isnan(losses(trainer)[2])
    found = find_last(tmp_path, run=None)
    assert found.folder is not None
    assert found.folder.name == "checkpoint-2"
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "nan-step-3", dtype=torch.float32)
    for name, weight in kept.named_parameters():
        assert torch.equal(weight, breaks.before["weights"][name]), name


FUSED: dict[str, Any] = {"optim": "adamw_torch_fused", "learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": 6}


@dataclass
class Run:
    weights: dict[str, torch.Tensor]
    moments: dict[str, Any]
    average: dict[str, torch.Tensor]
    schedule: int
    logs: list[dict[str, Any]]
    guard: list[Any]


def run_of(trainer: BaseTrainer, checkpoint: str | None = None) -> Run:
    """What training leaves behind in which steps 1, 4 and 5 are left out."""
    changes = Breaks(trainer, "gradient", (1, 4, 5))
    trainer.train(resume_from_checkpoint=checkpoint)
    average = trainer.parts[MovingAverage].average
    assert average is not None
    state = changes.state()
    names = ("loss", "grad_norm", "learning_rate", "guard/skipped_steps")
    logs = [{name: log[name] for name in names} for log in trainer.state.log_history if "loss" in log]
    guard = trainer.parts[Guard].steps
    return Run(
        weights=state["weights"],
        moments=state["optimizer"],
        average=average.state(keep=True),
        schedule=state["schedule"],
        logs=logs,
        guard=[guard.num_skipped, guard.in_a_row, {name: list(values) for name, values in guard.known.items()}],
    )


def test_nothing_differs_if_the_device_leaves_out_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**FUSED, **SAVING, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "ema_decay": 0.9}

    def trainer(folder: str) -> BaseTrainer:
        return make_trainer("sft", tmp_path / folder, on_nan="skip", **options)

    whole = run_of(trainer("late"))
    resumed = run_of(trainer("late"), str(tmp_path / "late" / "checkpoint-4"))
    monkeypatch.setattr(distributed, "updates_conditionally", lambda *_: False)
    early = run_of(trainer("early"))
    assert whole.guard[:2] == [3, 0]
    assert [log["guard/skipped_steps"] for log in whole.logs] == [1, 1, 1, 2, 3, 3]
    for name in ("weights", "moments", "average", "schedule", "guard"):
        assert same(vars(whole)[name], vars(early)[name]), name
        assert same(vars(whole)[name], vars(resumed)[name]), name
    assert repr(whole.logs) == repr(early.logs)  # two NaNs are not equal


def test_the_host_learns_of_a_step_only_after_its_update_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    read, step = guards.read_later, torch.optim.AdamW.step

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(guards, "read_later", lambda numbers: noted("read", read(numbers)))
    monkeypatch.setattr(torch.optim.AdamW, "step", noted("update", step))
    trainer = make_trainer("sft", tmp_path, **FUSED | {"max_steps": 2})
    trainer.train()
    assert events == ["update", "read"] * 2
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")  # which would leave out updates of somebody else
    for options in ({"optim": "adamw_torch"}, {"on_spike": "rollback", **SAVING}, {"optim": "sgd"}):
        events.clear()
        make_trainer("sft", tmp_path, **FUSED | {"max_steps": 1} | options).train()
        assert "read" not in events, options


def test_the_critics_gradients_count_when_they_are_clipped(tmp_path: Path) -> None:
    trainer: Any = make_trainer("ppo", tmp_path, max_grad_norm=1.0)
    trainer.critic.parameters()[0].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        trainer.train()


def test_skipping_ends_after_a_number_of_steps_in_a_row_and_keeps_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("sft", tmp_path, max_steps=6, on_nan="skip", nan_patience=2)
    Breaks(trainer, "gradient", (1, 3, 4))
    with pytest.raises(NonFiniteError, match=r"step 4: .* last of nan_patience=2 in a row\. The first .*nan-step-1"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("nan-step-*")] == ["nan-step-1"]
    assert "step 3: the gradient norm is" in caplog.text


class BreaksWeights(TrainerCallback):
    """Puts NaN into a weight after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step == 2:
            model.lm_head.weight.data[3, 4] = math.nan


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, **SAVING, max_steps=3, save_total_limit=1, callbacks=[BreaksWeights()])
    with pytest.raises(NonFiniteError, match=r"after step 2, lm_head\.weight holds NaN or infinity: it is not saved"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_skipping_does_not_save_them_either_and_says_what_was_wrong_before_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {**SAVING, "on_nan": "skip", "nan_patience": 2, "callbacks": [BreaksWeights()]}
    with pytest.raises(NonFiniteError, match=r"step 4: .*The weights were not finite before it: lm_head\.weight"):
        make_trainer("sft", tmp_path, max_steps=6, **options).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert "after step 2, lm_head.weight holds NaN or infinity: it is not saved" in caplog.text


def test_a_training_does_not_end_well_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    trainer = make_trainer("sft", tmp_path, max_steps=2, callbacks=[BreaksWeights()])
    with pytest.raises(NonFiniteError, match=r"after step 2, lm_head\.weight .*: training has ended"):
        trainer.train()


def test_a_learning_rate_that_is_far_too_high_ends_within_two_steps(tmp_path: Path) -> None:
    trainer = make_trainer("dpo", tmp_path, **SAVING, max_steps=6, learning_rate=1e30)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.state.global_step <= 2


def test_what_was_seen_before_a_checkpoint_counts_after_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {**SAVING, "on_nan": "skip", "nan_patience": 2}
    trainer = make_trainer("sft", tmp_path, max_steps=2, **options)
    Breaks(trainer, "loss", (2,))
    trainer.train()
    resumed = make_trainer("sft", tmp_path, max_steps=4, **options)
    Breaks(resumed, "loss", (3,))
    with pytest.raises(NonFiniteError, match=r"step 3: .* the last of nan_patience=2 in a row"):
        resumed.train(resume_from_checkpoint=True)
    assert list(resumed.parts[Guard].steps.known["loss"]) == losses(trainer)[:1]
