"""Requests, batches and credit of an online step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl import GRPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from prefrl.generation.base import OnDemand
from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.batches import sampled_batch
from prefrl.rollout.collect import Collector
from prefrl.trainer.offline.trainer import numbered_apart
from prefrl.trainer.online.policy_gradient import PolicyGradient
from prefrl.trainer.online.prompts import Prompts
from prefrl.trainer.scorer import Scores
from prefrl.types import Completion, Episode, Rollout, Turn
from tests.assets import ragged_batch


def rollout(turn_rewards: list[float], rest: float) -> Rollout:
    """Two ids in each turn, and one id that the model is told before the next; `rest` is the reward at the end."""
    turns, sent = [], [1, 2]
    for number in range(len(turn_rewards)):
        completion = Completion([10 + number, 20], "stop", [-1.0] * 2, [True] * 2, [0] * 2)
        turns.append(Turn(sent, completion))
        sent = [*sent, *completion.token_ids, 30]
    total = sum(turn_rewards) + rest
    episode = Episode("World", "stop", turn_rewards, reward=total)
    return Rollout(turns, {}, 0, rewards={"World": total}, reward=total, episode=episode)


# Returns from each turn on: (6, 5), (3) and (2, 0).
ROLLOUTS = [rollout([1.0, 2.0], 3.0), rollout([3.0], 0.0), rollout([2.0, 0.0], 0.0)]
# Ids of the policy and of what it is told, of the three rows.
LENGTHS = [5, 2, 5]


def advantages(args: Any, **scores: list[float]) -> list[list[float]]:
    """Of the trainable tokens of each row."""
    learner = PolicyGradient(args, RewardRunner([], environments={"World": object}))
    found = Scores({name: torch.tensor(values) for name, values in scores.items()})  # type: ignore[misc]
    batch = sampled_batch(ROLLOUTS, mask_truncated=False)
    ready = learner.advantages(batch, found, ROLLOUTS, num_parts=1, step=0, over_ranks=False).batch
    rows = zip(ready.advantages.split(LENGTHS), ready.trainable.split(LENGTHS), strict=True)
    return [values[mask].tolist() for values, mask in rows]


def check(found: list[list[float]], expected: list[list[float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def options(folder: Path, **others: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "turn_credit": "return", "beta": 0.0, **others}


def test_a_turn_has_the_advantage_of_its_return(tmp_path: Path) -> None:
    found = advantages(GRPOConfig(**options(tmp_path, scale_rewards="none")))
    first, second = [6 - 2.5, 3 - 4, 2 - 4.5], [5 - 0, None, 0 - 2.5]
    check(found, [[first[0]] * 2 + [second[0]] * 2, [first[1]] * 2, [first[2]] * 2 + [second[2]] * 2])


def test_group_scaling_divides_by_the_deviation_of_the_returns(tmp_path: Path) -> None:
    plain = advantages(GRPOConfig(**options(tmp_path, scale_rewards="none")))
    scaled = advantages(GRPOConfig(**options(tmp_path)))
    # Of 6, 3, 2 around 11 / 3 and of 5, 0, 0 around 5 / 3, of 2 + 2 free.
    deviation = ((49 + 4 + 25) / 9 + (100 + 25 + 25) / 9) / 4
    check(scaled, [[value / (deviation**0.5 + 1e-4) for value in row] for row in plain])


def test_a_penalty_in_the_reward_belongs_to_the_turn_of_its_tokens(tmp_path: Path) -> None:
    args = RLOOConfig(**options(tmp_path, beta=0.5, kl_in="reward", kl_estimator="k1"))
    # 0.5 * (4 + 2) nats in the second turn of the first episode; what the model is told has none.
    kl = [0.0, 0.0, 9.0, 4.0, 2.0] + [0.0] * 7
    found = advantages(args, old_logprobs=kl, ref_logprobs=[0.0] * 12)
    check(found, [[3 - 2.5] * 2 + [2 - 0] * 2, [3 - 2.5] * 2, [2 - 3] * 2 + [0 - 1] * 2])


def test_penalties_of_reference_and_teacher_add_up(tmp_path: Path) -> None:
    both = {"kl_in": "reward", "kl_estimator": "k1", "turn_credit": "episode"}
    both |= {"teacher_kl_coef": 0.25, "teacher_kl_kwargs": {"estimator": "k2", "in_reward": True}}
    old, ref, teacher = [0.0, 0.0, 9.0, 4.0, 2.0] + [0.0] * 7, [0.0] * 12, [0.0] * 5 + [4.0, 0.0] + [0.0] * 5
    teacher[:5] = old[:5]
    scores = {"old_logprobs": old, "ref_logprobs": ref, "teacher_logprobs": teacher}
    # 0.5 * (4 + 2) of the first, 0.25 * 4^2 / 2 of the second; what the model is told has none.
    rows = advantages(RLOOConfig(**options(tmp_path, beta=0.5, **both)), **scores)
    totals = [6 - 3, 3 - 2, 2]
    check(rows, [[t - (sum(totals) - t) / 2] * n for t, n in zip(totals, (4, 2, 4), strict=True)])
    tokens = advantages(
        ReinforcePlusPlusConfig(**options(tmp_path, beta=0.5, normalize_advantages=False, **both)), **scores
    )
    check(tokens, [[3.0, 3.0, 3.0, 5.0], [1.0, 3.0], [2.0] * 4])


def test_with_advantages_of_tokens_each_reward_stands_at_the_end_of_its_turn(tmp_path: Path) -> None:
    args = ReinforcePlusPlusConfig(**options(tmp_path, normalize_advantages=False))
    check(advantages(args, old_logprobs=[0.0] * 12), [[6.0, 6, 5, 5], [3.0, 3], [2.0, 2, 0, 0]])
    of_episodes = ReinforcePlusPlusConfig(**options(tmp_path, normalize_advantages=False, turn_credit="episode"))
    check(advantages(of_episodes, old_logprobs=[0.0] * 12), [[6.0] * 4, [3.0] * 2, [2.0] * 4])


class Asked:
    """A sampler that notes the seeds of prompts."""

    def __init__(self) -> None:
        self.seeds: Sequence[int] = []

    def start(self, rows: Any, groups: Any, sampling: Any, seeds: Sequence[int]) -> Any:
        self.seeds = seeds
        return OnDemand(lambda: [])

    def release(self, rollouts: Any) -> None: ...

    def close(self) -> None: ...


def seeds_of(folder: Path, number: int, **options: Any) -> Sequence[int]:
    """The seeds of the two prompts of a generation batch."""
    asked = Asked()
    nothing: Any = None  # is collected
    collector = Collector(nothing, asked, nothing, nothing)
    args = GRPOConfig(output_dir=str(folder), use_cpu=True, num_generations=4, **options)
    rows = [{"prompt_ids": [5]}, {"prompt_ids": [6]}]
    prompts = Prompts(args, rows, lambda _: [0, 1], collector=collector, sync=lambda: None)
    prompts.request(number, last=9)
    return asked.seeds


def test_every_prompt_of_every_generation_and_run_has_samples_of_its_own(tmp_path: Path) -> None:
    first = seeds_of(tmp_path, 0)
    assert seeds_of(tmp_path, 0) == first
    assert len({*first, *seeds_of(tmp_path, 1), *seeds_of(tmp_path, 0, seed=7)}) == 6


def test_the_batches_of_a_step_share_no_group() -> None:
    batch = ragged_batch()
    assert batch.group_index == (1, 0, 1, 2, 0)
    numbered = numbered_apart([batch, batch.select([3]), batch])
    assert [each.group_index for each in numbered] == [(0, 1, 0, 2, 1), (3,), (4, 5, 4, 6, 5)]
