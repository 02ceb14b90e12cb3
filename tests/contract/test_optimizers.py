"""Optimizers by name: each learns, and its state is in checkpoints; rates by name, penalties, clipping by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.options.optimizers import OPTIMIZERS
from tests.contract.cases import assert_same_weights, dataset_of, make_trainer, model_of, weights_of, whole_and_resumed

# Rates at which the tiny model learns in a few steps.
RATES = {
    "adadelta": 1.0,
    "asgd": 0.1,
    "lars": 10.0,
    "lamb": 1e-2,
    "sgd_8bit": 0.02,
    "rprop": 1e-3,
    "muon": 1e-2,
    "radam": 3e-2,
}
# What transformers does not pass on, and HuggingFace's own optimizers with groups of ours.
OTHERS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {"optim_args": "amsgrad=True", "learning_rates": {"norm": 1e-4, "mlp": 1e-2}},
    "adafactor": {"optim_args": "scale_parameter=True, beta1=0.9", "learning_rate": 0.1},
    "adagrad": {"optim_args": "initial_accumulator_value=0.1", "learning_rate": 3e-2},
}
SAVED_AT = 3


class WeightsOfSteps(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.steps.append(weights_of(kwargs["model"]))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_an_optimizer_learns_and_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    rate = RATES.get(name, 3e-3)
    settings = {"optim": name, "learning_rate": rate, "max_grad_norm": 1.0, **OTHERS.get(name, {})}
    settings |= {"max_steps": 6, "save_strategy": "steps", "save_steps": SAVED_AT, "rows": 8}
    whole = make_trainer("sft", tmp_path, **settings)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1  # all steps have the same rows
    resumed = make_trainer("sft", tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))
    assert_same_weights(resumed, whole)


def test_the_rate_of_a_weight_is_that_of_the_first_expression_in_its_name(tmp_path: Path) -> None:
    rates = {r"layers\.0\..*q_proj": 0.3, "q_proj|norm": 0.0}
    trainer = make_trainer("sft", tmp_path, learning_rate=0.1, learning_rates=rates, weight_decay=0.01)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    plain = make_trainer("sft", tmp_path / "plain", learning_rate=0.1, weight_decay=0.01)
    plain.train()
    for name, value in weights_of(plain.model).items():
        factor = 3.0 if "layers.0.self_attn.q_proj" in name else 0.0 if "q_proj" in name or "norm" in name else 1.0
        torch.testing.assert_close(after[name] - before[name], factor * (value - before[name]), rtol=1e-4, atol=1e-7)


def test_an_expression_that_is_in_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rates: 'vision' matches no name"):
        make_trainer("sft", tmp_path, learning_rates={"vision": 0.1}).train()


def test_rates_of_names_are_refused_with_an_optimizer_that_is_given(tmp_path: Path) -> None:
    model = model_of("sft")
    given = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ConfigError, match=r"learning_rates=.* has no effect"):
        make_trainer("sft", tmp_path, model=model, optimizers=given, learning_rates={"norm": 0.1})


def change(folder: Path, algorithm: str = "sft", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All weights before a step of SGD, and how much it changes them."""
    trainer = make_trainer(algorithm, folder, optim="sgd", learning_rate=0.1, **options)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    start = torch.cat([value.flatten() for value in before.values()])
    return start, torch.cat([value.flatten() for value in after.values()]) - start


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e9])
@pytest.mark.parametrize("kind", ["l1", "l2", "l1_l2"])
def test_the_gradient_of_the_penalty_is_added_once_a_step(kind: str, max_grad_norm: float, tmp_path: Path) -> None:
    cut = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_grad_norm": max_grad_norm}
    start, plain = change(tmp_path / "plain", **cut)
    _, with_penalty = change(tmp_path, **cut, regularization_type=kind, regularization_lambda=0.01)
    gradient = 0.01 * start.sign() * ("l1" in kind) + 0.02 * start * ("l2" in kind)
    torch.testing.assert_close(with_penalty - plain, -0.1 * gradient, rtol=1e-3, atol=1e-7)


def test_the_critic_of_ppo_has_the_penalty_too(tmp_path: Path) -> None:
    options = {"critic": "model", "max_grad_norm": 1e9, "critic_learning_rate": 0.1}
    start, plain = change(tmp_path / "plain", "ppo", **options)
    _, other = change(tmp_path, "ppo", **options, regularization_type="l2", regularization_lambda=0.01)
    torch.testing.assert_close(other - plain, -0.002 * start, rtol=1e-3, atol=1e-6)


def test_a_policy_that_waits_for_its_critic_has_no_penalty(tmp_path: Path) -> None:
    options = {"critic": "model", "critic_warmup": 3, "optim": "sgd", "critic_learning_rate": 0.1}
    options |= {"regularization_type": "l1_l2", "regularization_lambda": 0.01, "max_grad_norm": 0.0}
    trainer: Any = make_trainer("ppo", tmp_path, **options, max_steps=4, callbacks=[seen := WeightsOfSteps()])
    trainer.train()
    policy = [key for key in seen.steps[0] if "critic" not in key]
    assert all(torch.equal(seen.steps[2][key], seen.steps[0][key]) for key in policy)
    assert not all(torch.equal(seen.steps[3][key], seen.steps[2][key]) for key in policy)


def test_each_number_of_the_gradients_is_clipped_after_their_norm(tmp_path: Path) -> None:
    _, by_norm = change(tmp_path / "norm", max_grad_norm=1.0)
    _, clipped = change(tmp_path, max_grad_norm=1.0, max_grad_value=0.01)
    assert by_norm.abs().max() > 0.002
    torch.testing.assert_close(clipped, by_norm.clamp(-0.001, 0.001), rtol=1e-4, atol=1e-8)


def groups_of(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], set[int]]:
    """The parameter groups of PPO's optimizer, and the ids of its critic's parameters."""
    trainer: Any = make_trainer("ppo", folder, critic="model", **options)
    return trainer.create_optimizer().param_groups, {id(parameter) for parameter in trainer.critic.parameters()}


def test_the_critic_has_options_of_the_optimizer_of_its_own(tmp_path: Path) -> None:
    own = {"weight_decay": 0.2, "adam_beta2": 0.95, "adam_epsilon": 1e-5}
    options = {"optim": "adamw_torch", "critic_learning_rate": 0.3, "critic_optim_kwargs": own}
    groups, critic = groups_of(tmp_path, **options)
    seen = [
        (*(group[key] for key in ("lr", "weight_decay", "betas", "eps")), {id(p) in critic for p in group["params"]})
        for group in groups
    ]
    policy = [(0.1, 0.0, (0.9, 0.999), 1e-8, {False})] * 2
    assert seen == [*policy, (0.3, 0.2, (0.9, 0.95), 1e-5, {True}), (0.3, 0.0, (0.9, 0.95), 1e-5, {True})]


def test_options_of_the_critic_do_not_change_the_epsilon_of_muon(tmp_path: Path) -> None:
    groups, critic = groups_of(tmp_path, optim="muon", critic_optim_kwargs={"adam_epsilon": 1e-4})
    of_critic = [group for group in groups if id(group["params"][0]) in critic]
    assert {(group["use_muon"], group["eps"]) for group in of_critic} == {(True, 1e-7), (False, 1e-4)}


def test_the_learning_rate_of_the_critic_rises_by_itself(tmp_path: Path) -> None:
    own = {"warmup_steps": 4}
    options = {"critic": "model", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, "optim": "sgd"}
    options |= {"learning_rate": 0.1, "critic_learning_rate": 0.2, "critic_optim_kwargs": own, "reduce_on_plateau": 1}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("ppo", 2)}
    trainer: Any = make_trainer("ppo", tmp_path, **options)
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(10)
    seen = []
    for _ in range(6):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[-1]["lr"]))
        optimizer.step()
        scheduler.step()
    expected = [(0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.1, 0.15), (0.1, 0.2), (0.1, 0.2)]
    assert seen == [pytest.approx(pair) for pair in expected]
    scheduler.plateau.num_reductions = 1
    scheduler.step()
    factor = scheduler.plateau.params.factor
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[-1]["lr"]) == (0.1 * factor, 0.2 * factor)


def test_an_expression_that_names_the_critic_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rates: 'score' is found only in names of the critic's parameters"):
        groups_of(tmp_path, learning_rates={"score": 0.1})


def test_settings_of_groups_may_change_at_resume(tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1, "learning_rates": {"norm": 0.0}}
    make_trainer("sft", tmp_path, **options, max_steps=1).train()
    changed = {"adam_beta2": 0.9, "adam_epsilon": 1e-6, "learning_rate": 0.2}
    resumed = make_trainer("sft", tmp_path, **options, **changed, max_steps=2, allow_resume_changes=[*changed])
    resumed.train(resume_from_checkpoint=True)
    assert {(group["betas"], group["eps"]) for group in resumed.optimizer.param_groups} == {((0.9, 0.9), 1e-6)}
    assert {group["initial_lr"] for group in resumed.optimizer.param_groups} == {0.0, 0.2}


def test_the_gradients_of_the_critic_are_clipped_to_a_norm_of_its_own(tmp_path: Path) -> None:
    options = {"critic": "model", "max_grad_norm": 1e9, "optim": "sgd", "critic_learning_rate": 0.1}
    trainer: Any = make_trainer("ppo", tmp_path, **options, critic_optim_kwargs={"max_grad_norm": 1e-3})
    before = weights_of(trainer.critic.module)
    trainer.train()
    after = weights_of(trainer.critic.module)
    norm = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    assert float(norm) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_muon_updates_hidden_matrices_and_adamw_the_rest(tmp_path: Path) -> None:
    trainer: Any = make_trainer("ppo", tmp_path, critic="model", optim="muon", optim_args="adamw_lr=0.001")
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    of_muon = {names[id(p)] for group in groups if group["use_muon"] for p in group["params"]}
    matrices = {name for name, parameter in trainer.model.named_parameters() if ".layers." in name and "proj" in name}
    assert of_muon == {name for name in matrices if name.endswith("weight")}
    policy = [group for group in groups if not any("critic" in names[id(p)] for p in group["params"])]
    assert {(group["use_muon"], group["lr"]) for group in policy} == {(True, 0.1), (False, 0.001)}


def test_muon_and_a_critic_are_resumed_exactly(tmp_path: Path) -> None:
    settings = {"optim": "muon", "learning_rate": 1e-2, "critic": "model", "critic_learning_rate": 1e-2}
    settings |= {"max_grad_norm": 1.0, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    own = {"warmup_steps": 3, "weight_decay": 0.1, "adam_beta2": 0.9, "max_grad_norm": 0.5}
    settings |= {"lr_scheduler_type": "linear", "critic_optim_kwargs": own}
    whole, resumed = whole_and_resumed("ppo", tmp_path, 2, **settings)
    assert_same_weights(resumed, whole)
