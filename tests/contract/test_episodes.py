"""Episodes, from tools and environments to the update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from tests.assets import tiny_model
from tests.contract import episodes
from tests.contract.cases import make_trainer

LEARNING = {
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 96,
    "num_generations": 16,
    "max_completion_length": 16,
    "max_turns": 2,
    "beta": 0.0,
    "logging_steps": 10,
}


def rewards_of(trainer: Any) -> list[float]:
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def learner(folder: Path, environment: type, **options: Any) -> Any:
    data = Dataset.from_list(episodes.secrets(96))
    model = tiny_model(eos_token_id=[*range(128)])  # every token ends a turn
    return make_trainer("grpo", folder, model=model, train_dataset=data, environment=environment, **LEARNING | options)


def test_a_random_policy_learns_to_look_up_and_then_to_answer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": episodes.looked_up, "tool_parser": episodes.act, "max_steps": 150}
    trainer = learner(tmp_path, episodes.LookUp, **options)
    trainer.train()
    rewards = rewards_of(trainer)
    assert rewards[0] < 0.4, "chance"
    assert rewards[-1] > 0.9


def test_a_random_policy_learns_to_guess_in_two_turns(tmp_path: Path) -> None:
    trainer = learner(tmp_path, episodes.Guess, reward=None, turn_credit="return", max_steps=100)
    trainer.train()
    rewards = rewards_of(trainer)
    assert rewards[0] < 0.7, "chance"
    assert rewards[-1] > 0.9
