"""Requests completions of prompts, and turns them into scored rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from prefrl.data.collate import flat_batch
from prefrl.data.tokenize import completion_text
from prefrl.losses.advantage.estimators import row_totals
from prefrl.metrics import Mean, Metric, merge
from prefrl.types import Rollout, SampledBatch, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prefrl.generation.base import Generator, Pending, SamplingParams
    from prefrl.rewards.runner import RewardRunner
    from prefrl.types import Completion

__all__ = ["Collected", "Collector", "Request", "ask", "prompt_seed", "sampled_batch"]


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of a generation batch on this rank, and what reward functions logged in addition to rewards."""

    rollouts: list[Rollout]
    logged_metrics: dict[str, float] = field(default_factory=dict)
    logged_columns: dict[str, list[Any]] = field(default_factory=dict)
    reward_s: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)  # metrics of how prompts were chosen
    # What the curriculum learned, update by update: (dataset row, group, total reward) of all ranks.
    visits: list[list[tuple[int, int, float]]] = field(default_factory=list)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All groups of the parts, sorted by number.

        Columns are None for rollouts of parts that did not log them. Metrics are averaged over the rollouts of the
        parts that logged them.
        """
        rows = [
            (rollout, {name: values[i] for name, values in part.logged_columns.items()})
            for part in parts
            for i, rollout in enumerate(part.rollouts)
        ]
        rows.sort(key=lambda row: row[0].group)
        names = dict.fromkeys(name for part in parts for name in part.logged_columns)
        metrics: dict[str, Metric] = {}
        for part in (part for part in parts if part.rollouts):
            count = len(part.rollouts)
            merge(metrics, {name: Mean(value * count, count) for name, value in part.logged_metrics.items()})
        return cls(
            [rollout for rollout, _ in rows],
            {name: metric.value() for name, metric in metrics.items()},
            {name: [columns.get(name) for _, columns in rows] for name in names},
            reward_s=sum(part.reward_s for part in parts),
        )

    def select(self, which: Sequence[int]) -> Self:
        """Some of the rollouts; the metrics are kept as they are."""
        return replace(
            self,
            rollouts=[self.rollouts[i] for i in which],
            logged_columns={name: [values[i] for i in which] for name, values in self.logged_columns.items()},
        )


def prompt_seed(seed: int, generation: int, group: int) -> int:
    """The random seed of a prompt's samples. It depends on the run, the generation and the group, not on the rank."""
    return int(np.random.SeedSequence([seed, generation, group]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class Request:
    """Completions that were requested from a generator."""

    rows: Sequence[Mapping[str, Any]]  # [P] dataset rows with `prompt` and `prompt_ids`
    groups: list[int]  # [P] group number of each prompt
    pending: Pending
    seeds: list[int]  # [P] random seed of each prompt's samples


def ask(
    rows: Sequence[Mapping[str, Any]], *, generator: Generator, sampling: SamplingParams, seeds: Mapping[int, int]
) -> Request:
    """Request completions of the prompts of dataset rows.

    Args:
        rows: [P] dataset rows with `prompt` and `prompt_ids`.
        generator: The generator that samples the completions.
        sampling: The sampling parameters; `num_samples` is G.
        seeds: [P] group number of each prompt -> random seed of its samples.
    """
    prompts = [row["prompt_ids"] for row in rows]
    values = list(seeds.values())
    return Request(rows, list(seeds), generator.start(prompts, sampling, seeds=values), values)


@dataclass(frozen=True, slots=True)
class Collector:
    """Turns requested completions into scored rollouts.

    Args:
        rewards: Scores the completions.
        tokenizer: Decodes the completions for the rewards.
        trainer_state: Returns HuggingFace's state of the current training run, for rewards that ask for it.
        clock: Returns seconds.
        company: Context in which rewards are computed. All ranks enter it the same number of times.
    """

    rewards: RewardRunner
    tokenizer: PreTrainedTokenizerBase
    trainer_state: Callable[[], object]
    clock: Callable[[], float]
    company: Callable[[], AbstractContextManager[None]] = nullcontext

    def collect(self, request: Request) -> Collected:
        """Wait for all completions and score them together.

        Returns:
            P * G rollouts in the order of the rows; those of a group are adjacent.

        Raises:
            GenerationError: No completions could be generated.
            RewardError: A reward function failed.
        """
        completions = dict(request.pending.as_completed())
        return self._scored(request, [(number, completions[number]) for number in range(len(request.rows))])

    def by_group(self, request: Request) -> Iterator[Collected]:
        """Like `collect`, but yields each group as soon as its completions arrive, and scores it separately."""
        for number, completions in request.pending.as_completed():
            yield self._scored(request, [(number, completions)])

    def _scored(self, request: Request, samples: Sequence[tuple[int, list[Completion]]]) -> Collected:
        started = self.clock()
        rollouts = []
        for number, completions in samples:
            row = request.rows[number]
            is_conversational = not isinstance(row["prompt"], str)
            for sample in completions:
                text = completion_text(self.tokenizer, sample.token_ids, conversational=is_conversational)
                group = request.groups[number]
                turn = Turn(row["prompt_ids"], sample)
                rollouts.append(Rollout([turn], row, group, prompt=row["prompt"], text=text))
        with self.company():
            seed = request.seeds[samples[0][0]] if samples else 0
            metrics, columns = _score(rollouts, self.rewards, self.trainer_state(), seed)
        return Collected(rollouts, metrics, columns, reward_s=self.clock() - started)


def _score(
    rollouts: list[Rollout], rewards: RewardRunner, trainer_state: object, seed: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    if not rollouts:
        return {}, {}
    names = [name for name in rollouts[0].row if name not in ("prompt", "prompt_ids")]
    scores = rewards.score(
        [rollout.prompt for rollout in rollouts],
        [rollout.text for rollout in rollouts],
        [rollout.sampled_ids for rollout in rollouts],
        {name: [rollout.row[name] for rollout in rollouts] for name in names},
        trainer_state=trainer_state,
        seed=seed,
    )
    for i, rollout in enumerate(rollouts):
        rollout.rewards = {name: values[i] for name, values in scores.by_name.items()}
    _set_totals(rollouts, rewards.weights)
    return dict(scores.metrics), dict(scores.extra)


def _set_totals(rollouts: Sequence[Rollout], weights: Sequence[float]) -> None:
    """Set `reward`, the weighted sum of the rewards of each rollout; NaN if all its rewards are None."""
    values = [[math.nan if value is None else value for value in rollout.rewards.values()] for rollout in rollouts]
    totals = row_totals(torch.tensor(values, dtype=torch.float32), torch.tensor(weights))
    for rollout, total in zip(rollouts, totals.tolist(), strict=True):
        rollout.reward = total


def sampled_batch(rollouts: Sequence[Rollout], *, mask_truncated: bool) -> SampledBatch:
    """The flat batch of some rollouts, with each group's prompt once: a row for each turn.

    Args:
        rollouts: Completed rollouts.
        mask_truncated: Whether to exclude completions cut off at the length limit from the loss.
    """
    turns = [(turn, rollout.group) for rollout in rollouts for turn in rollout.turns]
    completions = [turn.completion for turn, _ in turns]
    batch = flat_batch(
        [turn.sent_ids for turn, _ in turns],
        [completion.token_ids for completion in completions],
        trainable=[
            [False] * len(completion.token_ids)
            if mask_truncated and completion.finish_reason == "length"
            else completion.trainable
            for completion in completions
        ],
        groups=[group for _, group in turns],
    )
    logprobs = [value for completion in completions for value in completion.logprobs]
    return SampledBatch.of(batch, sampling_logprobs=torch.tensor(logprobs, dtype=torch.float32))
