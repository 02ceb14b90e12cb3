"""The first updates of every online trainer and preset point towards the reward, and critics learn to foresee it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import learning
from prefrl.scripts import demo as demo_tiny
from tests.contract.cases import make_trainer

SEED = 1
# Cosine of the angle between an update and the gradient of the expected reward: 0.28 to 0.71 after two steps. Of two
# directions chosen at random it is below 0.01.
LEAST_COSINE = 0.2
PLAIN = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.02}

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Of a model after the demo's supervised training."""
    return learning.start(SEED, tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="session")
def gradient(weights: Weights) -> Weights:
    """Of the expected reward over all questions, at these weights; nothing is sampled."""
    model = demo_tiny.make_model(SEED)
    model.load_state_dict(weights)
    learning.expected_reward(model, demo_tiny.make_questions(SEED)[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", learning.CASES)
def test_updates_point_towards_the_reward(name: str, weights: Weights, gradient: Weights, tmp_path: Path) -> None:
    trainer = learning.make_trainer(name, SEED, weights, tmp_path, **PLAIN)
    trainer.train()
    after = trainer.policy.state_dict()
    update = torch.cat([(after[key] - weights[key]).flatten() for key in gradient])
    best = torch.cat([gradient[key].flatten() for key in gradient])
    assert torch.cosine_similarity(update, best, dim=0) > LEAST_COSINE


def is_long_prompt(prompts: list[str], **_: Any) -> list[float]:
    return [float(len(prompt.split()) > 3) for prompt in prompts]


@pytest.mark.parametrize(
    ("critic", "options", "least"),
    [
        # The hidden states of random weights tell a head less than a model of its own can learn.
        ("head", {"critic_learning_rate": 1e-3, "vf_coef": 1.0}, 0.3),
        ("model", {"critic_learning_rate": 1e-2}, 0.9),
    ],
)
def test_a_critic_comes_to_foresee_a_return_that_the_prompt_decides(
    critic: str, options: dict[str, Any], least: float, tmp_path: Path
) -> None:
    common = {"max_steps": 60, "num_iterations": 2, "per_device_train_batch_size": 32, "max_completion_length": 8}
    common |= {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0, "critic": critic}
    trainer = make_trainer("ppo", tmp_path, reward=is_long_prompt, rows=64, **common | options)
    trainer.train()
    explained = [entry["val/explained_variance"] for entry in trainer.state.log_history if "reward" in entry]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a new head gives 0 everywhere
    assert sum(explained[-10:]) / 10 > least
