"""Run by tests/contract/test_engines.py, in a process that finds torchtitan: its configs, losses and rollouts."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.experiments.rl.losses import DAPOLoss
from torchtitan.experiments.rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import RolloutTurnID

from prefrl.errors import ConfigError
from prefrl.integrations.of_tokens import LOSSES
from prefrl.integrations.torchtitan import ESTIMATORS, AdvantageEstimator, PolicyLoss
from prefrl.losses.tensors import TokenRows, policy_loss, row_advantages
from tests.engines.inputs import ADVANTAGE, MASK, OLD

LOGITS = torch.randn(*MASK.shape, 7, generator=torch.manual_seed(0))
LABELS = torch.arange(MASK.numel()).view(MASK.shape) % 7
SAMPLED = OLD.float()


def run(loss: Any, sampled: Any = SAMPLED, count: float | None = 8.0) -> tuple[Any, Any, dict[str, Any]]:
    leaf = LOGITS.clone().requires_grad_()
    advantages = ADVANTAGE.float()
    found, metrics = loss(leaf, LABELS, count, generator_logprobs=sampled, advantages=advantages, loss_mask=MASK)
    return found, torch.autograd.grad(found, leaf)[0], metrics


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_prefrl(name: str) -> None:
    found, gradient, metrics = run(PolicyLoss.Config(loss_type=name).build())
    leaf = LOGITS.clone().requires_grad_()
    logprobs = leaf.log_softmax(2).gather(2, LABELS[..., None]).squeeze(2)
    wanted = policy_loss(name, TokenRows(MASK), logprobs, SAMPLED, ADVANTAGE.float()).loss.sum() / MASK.sum()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, leaf)[0])
    assert metrics["loss/mean"] == found
    assert all(not value.requires_grad and value.dim() == 0 for value in metrics.values())


def test_our_surrogate_is_torchtitans() -> None:
    """The token whose log-prob is not finite has no loss in either."""
    sampled = SAMPLED.clone()
    sampled[0, 1] = float("nan")
    theirs = run(DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.3).build(), sampled, 7.0)
    ours = run(PolicyLoss.Config(hyperparameters={"epsilon_high": 0.3}).build(), sampled, 7.0)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
    assert ours[2]["trainer/entropy/mean"] == theirs[2]["trainer/entropy/mean"]


def group() -> RolloutGroup:
    rollouts = []
    for number, (reward, length) in enumerate([(1.0, 2), (0.0, 5), (0.5, 1), (None, 3)]):
        turn = RolloutTurn(
            rollout_id=RolloutTurnID(group_id=0, rollout_id=number, turn_id=0),
            prompt_token_ids=[1],
            completion_token_ids=[*range(length)],
            completion_logprobs=[-1.0] * length,
        )
        rollouts.append(
            Rollout(group_id=0, rollout_id=number, turns=[turn], status=RolloutStatus.COMPLETED, reward=reward)
        )
    return RolloutGroup(group_id=0, rollouts=rollouts)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_that_of_prefrl(name: str) -> None:
    found = AdvantageEstimator.Config(estimator=name).build()(group())
    rewards = torch.tensor([1.0, 0.0, 0.5, float("nan")], dtype=torch.float64)
    wanted = row_advantages(name, rewards, torch.zeros(4, dtype=torch.long), torch.tensor([2.0, 5.0, 1.0, 3.0]))
    assert found == pytest.approx(wanted.values.tolist())
    assert found[0] > 0
    assert found[3] == 0  # it has no reward


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "grpo"}, "loss_type='grpo' with torchtitan: it is not averaged over tokens"),
        ({"loss_type": "vespo"}, "loss_type='vespo' with torchtitan: it sums over a row"),
        ({"loss_type": "kl_cov"}, "with torchtitan"),
        ({"loss_type": "dapa"}, "loss_type='dapa' is not known. Did you mean 'dapo'?"),
        ({"hyperparameters": {"level": "sequence"}}, "level='sequence' with torchtitan"),
        ({"hyperparameters": {"rho": 2.0}}, "rho=2.0 is not a hyperparameter of loss_type='dapo'"),
    ],
)
def test_losses_that_torchtitan_cannot_compute_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        PolicyLoss.Config(**options).build()
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"estimator": "gae"}, "it needs more than the rewards of one group"),
        ({"estimator": "gpg"}, "it needs more than the rewards of one group"),
        ({"estimator": "grop"}, "estimator='grop' is not known. Did you mean 'grpo'?"),
        ({"hyperparameters": {"scale_rewards": "batch"}}, "one total reward and one group at a time"),
        ({"hyperparameters": {"gamma": 0.5}}, "gamma=0.5 is not a hyperparameter of estimator='grpo'"),
    ],
)
def test_estimators_that_torchtitan_cannot_compute_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        AdvantageEstimator.Config(**options).build()
    assert text in str(error.value)


def test_the_example_changes_loss_and_estimator() -> None:
    path = Path(__file__).parents[2] / "examples" / "engines" / "torchtitan.py"
    config = runpy.run_path(str(path))["cispo_qwen3_0_6b"]()
    assert config.trainer.loss.build().loss_type == "cispo"
    assert config.rollouter.advantage.build().estimator == "rloo"
