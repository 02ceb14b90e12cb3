"""Rollouts of completions, with their rewards and totals."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.batches import sampled_batch
from prefrl.rollout.collect import Collector, Request
from prefrl.types import Completion, Episode, FinishReason, Rollout, Turn


@dataclass
class Ready:
    """Rollouts that are there, and their sampler."""

    completions: list[Completion]
    released: list[Rollout] = field(default_factory=list)

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        yield 0, [Rollout([Turn([7], one)], ROW, 0, prompt="a", text="b") for one in self.completions]

    def cancel(self) -> None: ...

    def start(self, *_: object) -> Ready:
        return self

    def release(self, rollouts: Sequence[Rollout]) -> None:
        assert all(rollout.reward == rollout.reward for rollout in rollouts), "released before they were scored"
        self.released += rollouts

    def close(self) -> None: ...


ROW = {"prompt": "a", "prompt_ids": [7]}


def collected(rewards: RewardRunner, completions: list[Completion], seed: int) -> list[Rollout]:
    ready = Ready(completions)
    collector = Collector(rewards, ready, trainer_state=lambda: None, clock=lambda: 0.0)
    rollouts = collector.collect(Request(1, ready, [seed])).rollouts
    assert ready.released == rollouts
    return rollouts


def length(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [float(len(ids)) for ids in completion_ids]


def only_short(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [1.0 if len(ids) == 1 else None for ids in completion_ids]


def test_the_total_is_the_weighted_sum_of_the_rewards_that_there_are() -> None:
    rewards = RewardRunner(
        [length, only_short], weights=[0.5, -3.0], timeout=None, processing_classes=None, device=torch.device("cpu")
    )
    samples = [Completion([5] * n, "stop", [-1.0] * n, [True] * n, [0] * n) for n in (1, 4)]
    rollouts = collected(rewards, samples, 1)
    assert [rollout.reward for rollout in rollouts] == pytest.approx([0.5 * 1 - 3.0, 0.5 * 4])


def test_what_rewards_draw_follows_from_the_seed_of_the_first_prompt() -> None:
    def draw(completions: list[str]) -> list[float | None]:
        return [random.random()]

    samples = [Completion([5], "stop", [-1.0], [True], [0])]
    first, second, other = (collected(RewardRunner(draw), samples, seed)[0].reward for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_rows_are_the_ids_that_were_sent_and_those_that_came_back() -> None:
    def rollout(sent: list[int], ids: list[int], reason: FinishReason, trainable: list[bool]) -> Rollout:
        completion = Completion(ids, reason, [-float(token) for token in ids], trainable, [3] * len(ids))
        return Rollout([Turn(sent, completion)], {}, group=4)

    rollouts = [rollout([7, 8], [5, 6], "length", [True, True]), rollout([7, 8], [9, 4], "stop", [False, True])]
    assert [(r.prompt_ids, r.sampled_ids, r.finish_reason, r.policy_versions) for r in rollouts] == [
        ([7, 8], [5, 6], "length", [3, 3]),
        ([7, 8], [9, 4], "stop", [3, 3]),
    ]
    batch = sampled_batch(rollouts, mask_truncated=True)
    assert (batch.prompt_ids.tolist(), batch.prompt_index, batch.group_index) == ([7, 8], (0, 0), (4, 4))
    assert batch.response_ids.tolist() == [5, 6, 9, 4]
    assert batch.sampling_logprobs.tolist() == [-5.0, -6.0, -9.0, -4.0]
    assert batch.trainable.tolist() == [False, False, False, True]
    assert sampled_batch(rollouts, mask_truncated=False).trainable.tolist() == [True, True, False, True]


def test_an_episode_that_failed_is_not_scored() -> None:
    def count(
        completions: list[object], environments: list[str], log_extra: object, **_: object
    ) -> list[float | None]:
        log_extra("world", environments)  # type: ignore[operator]
        return [float(len(completions))] * len(completions)

    class Episodes(Ready):
        def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
            turn = Turn([7], self.completions[0])
            reasons = ("stop", "environment_error", "timeout")
            worlds = {"stop": "first", "timeout": "third"}
            yield (
                0,
                [
                    Rollout(
                        [turn], ROW, 0, "a", [], episode=Episode("W", r, [0.0], reward=0.5, environment=worlds.get(r))
                    )
                    for r in reasons
                ],
            )

        def release(self, rollouts: Sequence[Rollout]) -> None:
            self.released += rollouts

    ready = Episodes([Completion([5], "stop", [-1.0], [True], [0])])
    collector = Collector(
        RewardRunner(count, environments={"W": object}), ready, trainer_state=lambda: None, clock=lambda: 0.0
    )
    collected = collector.collect(Request(1, ready, [1]))
    rollouts = collected.rollouts
    assert [one.rewards for one in rollouts] == [
        {"count": 2.0, "W": 0.5},
        {"count": None, "W": None},
        {"count": 2.0, "W": 0.5},
    ]
    assert [rollouts[0].reward, rollouts[2].reward] == [2.5, 2.5]
    assert math.isnan(rollouts[1].reward)
    assert collected.logged_columns == {"world": ["first", None, "third"]}
    assert ready.released == rollouts
