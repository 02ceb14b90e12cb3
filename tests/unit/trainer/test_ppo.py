"""PPO's critic as it is given to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.models.export import PolicyWeights
from prefrl.trainer.ppo_trainer import PPOTrainer
from tests.assets import tiny_model, tiny_reward_model
from tests.contract.cases import make_trainer, stopping_model

CRITIC: dict[str, Any] = {"critic": "model", "critic_learning_rate": 0.1}


def ppo(folder: Path, **options: Any) -> PPOTrainer:
    trainer = make_trainer("ppo", folder, **options)
    assert isinstance(trainer, PPOTrainer)
    return trainer


def test_a_critic_that_is_given_is_trained_in_place(tmp_path: Path) -> None:
    given = tiny_reward_model(seed=5)
    before = given.score.weight.detach().clone()
    trainer = ppo(tmp_path, value_model=given, critic_learning_rate=0.1)  # as in TRL, no option is needed
    assert trainer.critic.module is given
    trainer.train()
    assert not torch.equal(given.score.weight, before)


@pytest.mark.parametrize("option", ["value_model", "value_model_name_or_path"])
def test_a_critic_that_is_named_is_loaded_with_the_arguments_of_the_model(option: str, tmp_path: Path) -> None:
    saved = tiny_reward_model(seed=5)
    folders = {"model": str(tmp_path / "policy"), option: str(tmp_path / "critic")}
    tiny_model().save_pretrained(folders["model"])
    saved.save_pretrained(folders[option])
    trainer = ppo(tmp_path, **folders, model_init_kwargs={"dtype": "bfloat16"}, **CRITIC)
    found = trainer.critic.module.score.weight
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), saved.score.weight, atol=0, rtol=2**-8)


def test_a_critic_checkpoints_the_layers_that_the_options_name(tmp_path: Path) -> None:
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    trainer = ppo(tmp_path, **options, **CRITIC)
    assert [layer.gradient_checkpointing for layer in trainer.critic.module.model.layers] == [True, False]
    trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_model": "anything", "critic": "head"}, "value_model has no effect with critic='head'"),
        ({"value_model": "anything", "value_model_name_or_path": "other"}, "both name the critic"),
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "PPO's optimizer also trains the critic"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo(tmp_path, **options)


def test_a_critic_that_is_a_reward_is_refused(tmp_path: Path) -> None:
    model = tiny_reward_model()
    with pytest.raises(ConfigError, match="value_model is also in reward_funcs"):
        ppo(tmp_path, value_model=model, reward=[model], **CRITIC)


class _Snapshots(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.policy: list[torch.Tensor] = []
        self.critic: list[torch.Tensor] = []

    def on_step_end(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        weights = dict(model.named_parameters())
        self.policy.append(weights["model.embed_tokens.weight"].detach().clone())
        self.critic.append(weights["prefrl_critic.score.weight"].detach().clone())


def test_the_policy_stays_as_it_is_while_the_critic_learns_alone(tmp_path: Path) -> None:
    seen = _Snapshots()
    options = {"critic_warmup": 2, "max_steps": 4, "optim": "adamw_torch", "weight_decay": 0.5}
    trainer = ppo(tmp_path, callbacks=[seen], **options, **CRITIC)
    before = trainer.policy.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert [torch.equal(weights, before) for weights in seen.policy] == [True, True, False, False]
    assert not torch.equal(seen.critic[0], seen.critic[1])
    # Weights without a gradient of their own decay again.
    unused = (seen.policy[3] != seen.policy[2]).all(1)
    assert bool(unused.all())


def test_a_policy_that_is_saved_or_sent_has_no_critic(tmp_path: Path) -> None:
    names = [name for name, _ in PolicyWeights(stopping_model())]
    trainer = ppo(tmp_path / "run", **CRITIC)
    trainer.policy.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == set(names)
    assert [name for name, _ in trainer.weights] == names


def test_the_critic_has_its_own_learning_rate_and_weight_decay_but_not_for_norms(tmp_path: Path) -> None:
    trainer = ppo(tmp_path, **CRITIC, learning_rate=0.2, weight_decay=0.5)
    *of_policy, decaying, other = trainer.create_optimizer().param_groups
    names = {id(p): name for name, p in trainer.critic.module.named_parameters()}
    assert [group["weight_decay"] for group in (decaying, other)] == [0.5, 0.0]
    assert {names[id(p)] for p in other["params"]} == {
        name for name in names.values() if "norm" in name or "bias" in name
    }
    assert {id(p) for group in (decaying, other) for p in group["params"]} == set(names)
    assert {group["lr"] for group in (decaying, other)} == {0.1}
    assert {group["lr"] for group in of_policy} == {0.2}


def test_the_critic_decays_while_it_learns_alone(tmp_path: Path) -> None:
    seen = _Snapshots()
    options = {"critic_warmup": 2, "max_steps": 3, "weight_decay": 0.5, "lr_scheduler_type": "constant"}
    trainer = ppo(tmp_path, callbacks=[seen], **options, **CRITIC | {"critic_learning_rate": 0.1})
    trainer.critic.module.score.weight.data.fill_(1.0)
    for parameter in trainer.critic.parameters():
        parameter.register_hook(torch.zeros_like)
    trainer.train()
    # SGD without a gradient: each step multiplies by 1 - 0.1 * 0.5.
    torch.testing.assert_close(seen.critic[1], torch.full_like(seen.critic[1], 0.95**2))


def test_gradients_of_policy_and_critic_are_clipped_apart(tmp_path: Path) -> None:
    trainer = ppo(tmp_path, **CRITIC, max_grad_norm=0.5)
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    critic = list(trainer.critic.parameters())
    own = {id(parameter) for parameter in critic}
    policy = [parameter for parameter in trainer.policy.parameters() if id(parameter) not in own]
    norm = float(trainer._clip_grad_norm(trainer.model))
    assert norm == pytest.approx(sum(p.numel() for p in policy) ** 0.5, rel=1e-5)
    for part in (policy, critic):
        assert sum(float(p.grad.square().sum()) for p in part) == pytest.approx(0.5**2, rel=1e-4)


@pytest.mark.parametrize("critic", ["head", "model"])
def test_mixed_precision_ends_with_a_training(critic: str, tmp_path: Path) -> None:
    make_trainer("ppo", tmp_path, bf16=True, critic=critic, max_steps=1).train()
    is_left_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)  # for the tests that follow
    assert not is_left_on
