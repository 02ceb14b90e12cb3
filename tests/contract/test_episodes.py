"""Episodes, from tools and environments to the update."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.assets import tiny_model
from tests.contract import episodes
from tests.contract.cases import make_trainer, relative_difference, update_of

WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "tie_word_embeddings": True}
LEARNING = {
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "entropy_coef": 0.03,
    "per_device_train_batch_size": 96,
    "num_generations": 4,
    "max_completion_length": 16,
    "max_turns": 2,
    "beta": 0.0,
}


def rewards_of(trainer: Any) -> list[float]:
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def learner(folder: Path, environment: type, **options: Any) -> Any:
    data = Dataset.from_list(episodes.secrets(96))
    model = tiny_model(**WIDE, eos_token_id=[*range(128)])  # every token ends a turn
    return make_trainer("grpo", folder, model=model, train_dataset=data, environment=environment, **LEARNING | options)


def test_a_random_policy_learns_to_look_up_and_then_to_answer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": episodes.looked_up, "tool_parser": episodes.act, "max_steps": 24}
    options["seed"] = 1  # some seeds take longer
    trainer = learner(tmp_path, episodes.LookUp, **options)
    trainer.train()
    rewards = rewards_of(trainer)
    assert rewards[0] < 0.4, "chance"
    assert sum(rewards[-5:]) / 5 > 0.9


def test_a_random_policy_learns_to_guess_in_two_turns(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": None, "turn_credit": "return", "learning_rate": 2e-3, "max_steps": 15}
    trainer = learner(tmp_path, episodes.Guess, **options)
    trainer.train()
    rewards = rewards_of(trainer)
    assert rewards[0] < 0.7, "chance"
    assert sum(rewards[-5:]) / 5 > 0.9


class SlowTalk(episodes.Talk):
    """Answers late, and each time in another order."""

    def respond(self, message: Any) -> Any:
        time.sleep(random.Random().random() / 50)
        return super().respond(message)


@pytest.mark.parametrize("workers", [1, 3, None])
def test_neither_the_order_of_answers_nor_the_number_of_workers_changes_the_update(
    workers: int | None, tmp_path: Path
) -> None:
    expected = update_of(make_trainer("grpo", tmp_path, talks="forgetful", max_steps=2))
    options: dict[str, Any] = {"environment": SlowTalk, "max_concurrent_environments": workers, "max_steps": 2}
    trainer = make_trainer("grpo", tmp_path / "slow", talks="forgetful", **options)
    assert relative_difference(update_of(trainer), expected) < 1e-5


def test_a_group_learns_from_the_episodes_whose_environments_did_not_fail(tmp_path: Path) -> None:
    """The baseline is over the seven others, and the table says which one failed."""

    class Fails(episodes.Talk):
        def reset(self, prompt: Any, **row: Any) -> str:
            if self.seed % 8 == 3:
                raise ConnectionError("gone")
            return super().reset(prompt, **row)

    options: dict[str, Any] = {"environment": Fails, "per_device_train_batch_size": 32, "num_generations": 8}
    trainer = make_trainer("grpo", tmp_path, talks="faithful", environment_error="retry", **options)
    seen: list[Any] = []
    learned = trainer.learner.advantages  # type: ignore[attr-defined]

    def noted(batch: Any, scores: Any, rollouts: Any, **more: Any) -> Any:
        result = learned(batch, scores, rollouts, **more)
        seen.extend(zip(rollouts, result.advantages, result.batch.trainable_counts, strict=True))
        return result

    trainer.learner.advantages = noted  # type: ignore[attr-defined]
    trainer.train()
    failed = [one for one in seen if one[0].has_failed]
    assert 0 < len(failed) < 12
    assert all(
        advantage == 0 and count == 0 and rollout.reward != rollout.reward for rollout, advantage, count in failed
    )
    groups = {rollout.group: 0.0 for rollout, *_ in seen}
    for rollout, advantage, _ in seen:
        groups[rollout.group] += advantage
    assert all(abs(total) < 1e-4 for total in groups.values()), "a baseline counts an episode that failed"
    logged = trainer.state.log_history[0]
    assert logged["episodes/stop_reason/environment_error"] == len(failed) / 32
