"""Agents, from requests over a chat API to the update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.local.turns import LocalTurns
from prefrl.models.forward import token_logprobs
from prefrl.rewards.runner import reward_fingerprint
from prefrl.rollout.batches import sampled_batch
from prefrl.rollout.episodes.environment import Agent
from prefrl.types import Rollout
from tests.contract import episodes
from tests.contract.cases import make_trainer, relative_difference, update_of

WANDER: dict[str, Any] = {"environment": Agent(episodes.wander), "max_turns": None}
# What a run logs that is a time.
TIMED = ("time/", "train_runtime", "train_samples", "train_steps", "memory/", "perf/", "step_time")


def one_by_one(sampling: Any, turns: Callable[[Any], LocalTurns]) -> LocalTurns:
    """Samples each request alone: those that are sampled together differ in the last bits of their log-probs."""
    generate = turns(sampling).generate
    return LocalTurns(lambda wave: [completion for request in wave for completion in generate([request])])


def trained(trainer: Any) -> list[Rollout]:
    """Train; returns the rollouts that were learned from."""
    seen: list[Rollout] = []
    trainer.generator.turns = partial(one_by_one, turns=trainer.generator.turns)
    learned = trainer._learned

    def noted(rollouts: list[Rollout], **more: Any) -> Any:
        seen.extend(rollouts)
        return learned(rollouts, **more)

    trainer._learned = noted
    trainer.train()
    return seen


def numbers_of(trainer: Any) -> list[dict[str, float]]:
    """What was logged of each step."""
    return [
        {name: value for name, value in entry.items() if not name.startswith(TIMED) and value == value}
        for entry in trainer.state.log_history
    ]


def test_an_agent_and_an_environment_that_do_the_same_give_the_same_rollouts_and_the_same_training(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"talks": "forgetful", "turn_credit": "return", "max_steps": 3, "tool_parser": None}
    played = make_trainer("grpo", tmp_path / "environment", environment=episodes.Echo, **options)
    asked = make_trainer("grpo", tmp_path / "agent", environment=Agent(episodes.echo), **options)
    assert asked.decisive()["episodes"] == {"echo": reward_fingerprint(episodes.echo)}
    expected, found = trained(played), trained(asked)
    assert len({rollout.reward for rollout in found}) > 3
    for one, other in zip(found, expected, strict=True):
        assert (one.turns, one.text, one.prompt) == (other.turns, other.text, other.prompt)
        assert (one.reward, one.advantage, one.finish_reason) == (other.reward, other.advantage, other.finish_reason)
        assert one.episode is not None
        assert other.episode is not None
        assert one.episode.turn_rewards == other.episode.turn_rewards
        assert one.episode.stop_reason == other.episode.stop_reason
    for mine, its in zip(numbers_of(asked), numbers_of(played), strict=True):
        assert {name.replace("rewards/echo", "rewards/Echo"): value for name, value in mine.items()} == its


@pytest.mark.parametrize("talks", ["faithful", "forgetful"])
def test_log_probs_of_all_turns_of_a_session_are_those_of_the_sampler(talks: str, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, talks=talks, learning_rate=0.0, **WANDER)
    rollouts = trained(trainer)
    batch = sampled_batch(rollouts, mask_truncated=False)
    with torch.no_grad():
        found = token_logprobs(trainer.model, batch, temperature=1.0, plan="shared_prefix").logprobs
    assert batch.num_trainable == sum(len(rollout.sampled_ids) for rollout in rollouts)
    assert {len(rollout.turns) for rollout in rollouts} == {7}
    assert (found - batch.sampling_logprobs)[batch.trainable].abs().max() < 1e-5
    (logged, *_) = trainer.state.log_history
    assert logged["episodes/mean_forward_tokens"] < 0.8 * logged["episodes/mean_tokens"]
    assert logged["episodes/tokens_sampled"] == logged["episodes/tokens_trained"] == batch.num_trainable


@pytest.mark.parametrize(
    "other",
    [{"forward_plan": "padded"}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}],
    ids=str,
)
def test_neither_the_forward_plan_nor_the_micro_batches_change_the_update_of_sessions(
    other: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"talks": "forgetful", "turn_credit": "return", **WANDER}
    expected = update_of(make_trainer("grpo", tmp_path / "one", forward_plan="shared_prefix", **options))
    assert relative_difference(update_of(make_trainer("grpo", tmp_path / "two", **options | other)), expected) < 1e-5
