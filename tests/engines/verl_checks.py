"""Run by tests/contract/test_engines.py, in a process that finds verl: its registries, configs and aggregation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass

import prefrl.integrations.verl as adapter
from prefrl.errors import ConfigError
from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.tensors import TokenRows, advantages, reduction_of
from tests.engines.inputs import ADVANTAGE, LENGTH, LOGPROBS, LOSSES, MASK, OLD, WEIGHTS, check, expected
from tests.pages import marked_block

EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    """The example, parsed by Hydra as verl's main does."""
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        yield compose("verl", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])


def actor(config: Any, name: str) -> Any:
    """verl's config of the actor, as its workers have it."""
    section = OmegaConf.merge(
        config.actor_rollout_ref.actor,
        {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 2, "loss_scale_factor": LENGTH},
        {"loss_agg_mode": adapter.AGGREGATIONS[reduction_of(name)], "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    )
    return omega_conf_to_dataclass(section)


def hyperparameters(name: str) -> dict[str, Any]:
    """Those that verl's config has: its defaults are 3 for clip_ratio_c and ours for the temperatures."""
    ours = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 3.0}
    names = adapter.loss_params(name, adapter.POLICY_LOSSES[name].levels[0], {}).names()  # type: ignore[index]
    return {key: value for key, value in ours.items() if key in names}


def test_the_example_selects_what_is_registered(config: Any) -> None:
    assert core_algos.get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    assert core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)
    assert adapter.__name__ == config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES
    assert config.trainer.total_epochs == 30  # verl's default: the example is on top of its config


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_every_loss_over_micro_batches_is_that_of_prefrl(name: str, weighted: bool, config: Any) -> None:
    """Three micro-batches of a row each, on two ranks that average their gradients."""
    settings, leaf = actor(config, name), LOGPROBS.clone().requires_grad_()
    settings.global_batch_info.update(
        dp_size=2, batch_num_tokens=MASK.sum(), global_batch_size=len(MASK), loss_scale_factor=LENGTH
    )
    loss = core_algos.get_policy_loss_fn(f"prefrl_{name}")
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(MASK)):
        part = slice(row, row + 1)
        found, metrics = loss(
            old_log_prob=OLD[part],
            log_prob=leaf[part],
            advantages=ADVANTAGE[part],
            response_mask=MASK[part],
            loss_agg_mode=settings.loss_agg_mode,
            config=settings,
            rollout_is_weights=WEIGHTS[part] if weighted else None,
        )
        assert all(type(value) is float for value in metrics.values())
        total = total + found / 2
    wanted = expected(name, weights=WEIGHTS if weighted else 1.0, **hyperparameters(name))
    check(total, torch.autograd.grad(total, leaf)[0], wanted)


def test_our_surrogate_is_verls(config: Any) -> None:
    settings, leaf = actor(config, "dapo"), LOGPROBS.clone().requires_grad_()
    found = [
        core_algos.get_policy_loss_fn(name)(OLD, leaf, ADVANTAGE, MASK, "token-mean", settings)[0]
        for name in ("vanilla", "prefrl_dapo")
    ]
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in found]
    check(found[0], gradients[0], (found[1].detach(), gradients[1]))


@pytest.mark.parametrize("name", adapter.ESTIMATORS)
def test_every_estimator_is_that_of_prefrl(name: str, config: Any) -> None:
    uids = np.array(["b", "a", "b"], dtype=object)
    rewards = torch.zeros(MASK.shape).masked_fill(MASK, 0.125)
    rewards[0, 3], rewards[2, 3] = 1.0, 0.5
    estimate = core_algos.get_adv_estimator_fn(f"prefrl_{name}")
    found, returns = estimate(token_level_rewards=rewards, response_mask=MASK, config=config.algorithm, index=uids)
    given = rewards if ADVANTAGES[name].level == "token" else rewards.sum(1)
    wanted = advantages(name, TokenRows(MASK), given, torch.tensor([0, 1, 0])).values
    torch.testing.assert_close(found, wanted)
    assert returns is found
    assert found.abs().sum() > 0


def test_verls_options_of_an_estimator_act(config: Any) -> None:
    rewards = torch.zeros(MASK.shape)
    rewards[0, 3], rewards[1, 0] = 1.0, 0.25
    plain = OmegaConf.merge(config.algorithm, {"norm_adv_by_std_in_grpo": False})
    found, _ = core_algos.get_adv_estimator_fn("prefrl_grpo")(rewards, MASK, plain, index=["a"] * 3)
    assert found[:, 0].tolist() == pytest.approx([1 - 1.25 / 3, 0.25 - 1.25 / 3, -1.25 / 3])
    discounted = OmegaConf.merge(config.algorithm, {"gamma": 0.5})
    adapter.register_estimator("not_whitened", "reinforce_plus_plus", clip_range=[-9.0, 0.4])
    found, _ = core_algos.get_adv_estimator_fn("not_whitened")(rewards, MASK, discounted, index=["a"] * 3)
    assert found.max() == pytest.approx(0.4)


def test_a_name_of_ones_own_has_hyperparameters_of_its_own(config: Any) -> None:
    adapter.register_policy_loss("gspo_of_mine", "grpo", level="sequence", epsilon_high=0.1, delta=None)
    leaf = LOGPROBS.clone().requires_grad_()
    loss = core_algos.get_policy_loss_fn("gspo_of_mine")
    found, _ = loss(OLD, leaf, ADVANTAGE, MASK, "seq-mean-token-mean", actor(config, "grpo"))
    wanted = expected("grpo", level="sequence", epsilon=0.2, epsilon_high=0.1)
    check(found, torch.autograd.grad(found, leaf)[0], wanted)


def test_the_block_of_the_docs_registers_its_names(config: Any) -> None:
    exec(compile(marked_block("library.md", "integrations.verl import"), "<library>", "exec"), {})
    leaf, loss = LOGPROBS.clone().requires_grad_(), core_algos.get_policy_loss_fn("gspo_of_prefrl")
    found, _ = loss(OLD, leaf, ADVANTAGE, MASK, "seq-mean-token-mean", actor(config, "grpo"))
    wanted = expected("grpo", level="sequence", epsilon=3e-4, epsilon_high=4e-4, delta=3.0)
    check(found, torch.autograd.grad(found, leaf)[0], wanted)
    rewards = torch.zeros(MASK.shape)
    rewards[0, 3] = 9.0
    found, _ = core_algos.get_adv_estimator_fn("rloo_clipped")(rewards, MASK, config.algorithm, index=["a"] * 3)
    assert found.max() == 2.0


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_sampled_kl_form_has_a_name_in_verl(name: str) -> None:
    names = {"k1": "k1", "abs": "abs", "k2": "k2", "k3": "k3", "k1+": "k1+", "abs+": "abs+", "k3+": "k3+"}
    leaf, mine = LOGPROBS.clone().requires_grad_(), LOGPROBS.clone().requires_grad_()
    found = core_algos.kl_penalty(leaf, OLD, names[name])
    wanted = KL_ESTIMATORS[name].function(mine, OLD)
    check(
        found, torch.autograd.grad(found.sum(), leaf)[0], (wanted.detach(), torch.autograd.grad(wanted.sum(), mine)[0])
    )


def test_what_verl_cannot_compute_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="selects tokens of a whole generation batch"):
        adapter.register_policy_loss("x", "kl_cov")
    with pytest.raises(ConfigError, match=r"it needs values, which verl passes to its own estimators only"):
        adapter.register_estimator("x", "gae")
    with pytest.raises(ConfigError, match=r"epsilon_hihg=0.3 is not a hyperparameter"):
        adapter.register_policy_loss("x", "dapo", epsilon_hihg=0.3)
    with pytest.raises(ConfigError, match="is not a hyperparameter of estimator='rloo'"):
        adapter.register_estimator("x", "rloo", gamma=0.5)
    loss, settings = core_algos.get_policy_loss_fn("prefrl_grpo"), actor(config, "grpo")
    with pytest.raises(ConfigError, match=r"Set actor_rollout_ref.actor.loss_agg_mode='seq-mean-token-mean'"):
        loss(OLD, LOGPROBS, ADVANTAGE, MASK, "token-mean", settings)
    constant = omega_conf_to_dataclass(
        OmegaConf.merge(
            config.actor_rollout_ref.actor,
            {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 2, "loss_scale_factor": None},
        )
    )
    with pytest.raises(ConfigError, match="loss_scale_factor=None"):
        core_algos.get_policy_loss_fn("prefrl_dr_grpo")(
            OLD, LOGPROBS, ADVANTAGE, MASK, "seq-mean-token-sum-norm", constant
        )
