"""Optimizers with two sets of weights: one is trained, its average is evaluated, saved and used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefrl.generation.local.generator import LocalGenerator
from tests.contract.cases import dataset_of, make_trainer, relative_difference


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


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.policy.parameters()])


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_evaluations_and_checkpoints_change_nothing_that_is_learned(algorithm: str, tmp_path: Path) -> None:
    plain = averaging(algorithm, tmp_path / "plain")
    plain.train()
    both = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    watched = averaging(algorithm, tmp_path / "watched", eval_dataset=dataset_of(algorithm, 4), **both)
    watched.train()
    assert relative_difference(weights_of(watched), weights_of(plain)) < 1e-5


def test_the_average_is_evaluated_saved_and_left_in_the_model(tmp_path: Path) -> None:
    trainer = averaging("sft", tmp_path, eval_dataset=dataset_of("sft", 4), save_strategy="steps", save_steps=3)
    trainer.train()
    assert not trainer.optimizer.optimizer.is_training
    average = weights_of(trainer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, dict(trainer.policy.named_parameters())[name])
    trainer.optimizer.train()
    assert relative_difference(weights_of(trainer), average) > 1e-4
    trainer.evaluate()
    assert relative_difference(weights_of(trainer), average) < 1e-6


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
