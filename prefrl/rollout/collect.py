"""From rows of a dataset to scored rollouts: samplers, requests made ahead, scores.

A `Collector` asks a `RolloutSampler` for rollouts, which asks a `Generator` for completions or, in `episodes`, for the
turns of a conversation. Both answer with a `Pending`: servers work on it meanwhile, the generator in this process only
when it is read. Then the collector lets a `RewardRunner` score all rollouts together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from prefrl import distributed
from prefrl.data.images import ImageReader
from prefrl.data.tokenize import decoded_completion
from prefrl.errors import EpisodeError
from prefrl.generation.base import Generator, Pending, Polled, SamplingParams
from prefrl.losses.advantage.estimators import row_totals
from prefrl.metrics import Mean, Metric, merge
from prefrl.rewards.runner import RewardRunner
from prefrl.types import Completion, Images, Rollout, Turn


class RolloutSampler(Protocol):
    """Samples rollouts without rewards."""

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """Request rollouts.

        Args:
            rows: [P] rows of the dataset with `prompt` and `prompt_ids`.
            groups: [P] group number of each prompt.
            sampling: The sampling parameters; `num_samples` is G.
            seeds: [P] random seed of each prompt's samples.
        """
        ...

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """Say that these rollouts are scored, so that what they hold can be used for others."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionSampler:
    """Samples one completion for each rollout.

    Args:
        generator: Returns the current generator, which may change.
        tokenizer: Decodes the completions for the rewards.
        reader: Reads the images of prompts; None: there are none.
        hidden: Stop strings that rewards do not see.
    """

    generator: Callable[[], Generator]
    tokenizer: PreTrainedTokenizerBase
    reader: ImageReader | None = None
    hidden: Sequence[str] = ()

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """See `RolloutSampler`."""
        prompts = [row["prompt_ids"] for row in rows]
        if self.reader is None or not any(row.get("images") for row in rows):
            pending = self.generator().start(prompts, sampling, seeds=seeds)
            return _Decoded(pending, rows, groups, self, [None] * len(rows))
        images = [self.reader.of_prompt(row) for row in rows]
        pending = self.generator().start(prompts, sampling, seeds=seeds, images=images)
        return _Decoded(pending, rows, groups, self, images)

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """No-op: they hold nothing."""

    def close(self) -> None:
        """No-op: the generator is the trainer's."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Requested completions, as rollouts."""

    pending: Pending[Completion]
    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[int]
    sampler: CompletionSampler
    images: Sequence[Images | None]

    def as_completed(
        self, arrived: Iterator[tuple[int, list[Completion]]] | None = None
    ) -> Iterator[tuple[int, list[Rollout]]]:
        for number, completions in self.pending.as_completed() if arrived is None else arrived:
            row, group, images = self.rows[number], self.groups[number], self.images[number]
            is_conversational = not isinstance(row["prompt"], str)
            found = []
            for completion in completions:
                ends = self.sampler.hidden if completion.finish_reason == "stop_string" else ()
                text = decoded_completion(
                    self.sampler.tokenizer, completion.token_ids, conversational=is_conversational, ends=ends
                )
                turn = Turn(row["prompt_ids"], completion)
                found.append(Rollout([turn], row, group, prompt=row["prompt"], text=text, images=images))
            yield number, found

    def cancel(self) -> None:
        self.pending.cancel()

    # As a `Polled`, if the generator returns one.

    @property
    def _polled(self) -> Polled[Completion]:
        return cast("Polled[Completion]", self.pending)

    @property
    def longest_silence(self) -> float:
        return self._polled.longest_silence

    @property
    def is_stuck(self) -> bool:
        return self._polled.is_stuck

    def arrived(self) -> Iterator[tuple[int, list[Rollout]]]:
        return self.as_completed(self._polled.arrived())

    def repeat_lost(self) -> None:
        self._polled.repeat_lost()


class PrefetchQueue:
    """A queue of requests that runs ahead of training by a bounded number of generation batches.

    A batch is requested at most `num_ahead` batches before it is trained on, so no completion is ever too old and
    none is thrown away.

    Args:
        ask: Requests the generation batch with this number, counted from the start of training.
        num_ahead: Number of batches that may be requested in advance, in addition to the one that is needed.
    """

    def __init__(self, ask: Callable[[int], Request], *, num_ahead: int) -> None:
        self._ask = ask
        self._num_ahead = num_ahead
        self._queue: deque[tuple[int, Request]] = deque()

    def take(self, number: int, *, last: int) -> Request:
        """The request of the generation batch that is needed now. First requests all batches that are allowed by now.

        Args:
            number: Number of the batch.
            last: Number of the last batch of training.
        """
        if self._queue and self._queue[0][0] != number:
            self.drop()
        first_new = self._queue[-1][0] + 1 if self._queue else number
        for new in range(first_new, min(number + self._num_ahead, last) + 1):
            self._queue.append((new, self._ask(new)))
        return self._queue.popleft()[1]

    def __len__(self) -> int:
        return len(self._queue)

    def drop(self) -> None:
        """Cancel all pending requests."""
        for _, request in self._queue:
            request.pending.cancel()
        self._queue.clear()


@dataclass(frozen=True, slots=True)
class Collected:
    """The rollouts of a generation batch on this process, and what reward functions logged in addition to rewards."""

    rollouts: list[Rollout]
    logged_metrics: dict[str, float] = field(default_factory=dict)
    logged_columns: dict[str, list[Any]] = field(default_factory=dict)
    reward_s: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)  # metrics of how prompts were chosen
    # What the curriculum learned, update by update: (dataset row, group, total reward) of all ranks.
    visits: list[list[tuple[int, int, float]]] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)  # of its groups, see `GroupPool`

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All groups of the parts, sorted by number, without visits and tickets.

        Columns are None for rollouts of parts that did not log them. Logged metrics are averaged over the rollouts of
        the parts that logged them.
        """
        rows = [
            (rollout, {name: values[i] for name, values in part.logged_columns.items()})
            for part in parts
            for i, rollout in enumerate(part.rollouts)
        ]
        rows.sort(key=lambda row: row[0].group)
        names = dict.fromkeys(name for part in parts for name in part.logged_columns)
        logged: dict[str, Metric] = {}
        metrics: dict[str, Metric] = {}
        for part in parts:
            merge(metrics, part.metrics)
            if count := len(part.rollouts):
                merge(logged, {name: Mean(value * count, count) for name, value in part.logged_metrics.items()})
        return cls(
            [rollout for rollout, _ in rows],
            {name: metric.value() for name, metric in logged.items()},
            {name: [columns.get(name) for _, columns in rows] for name in names},
            reward_s=sum(part.reward_s for part in parts),
            metrics=metrics,
        )

    def of_team(self) -> Self:
        """What all processes of the team have collected, which all of them learn from. All processes must call it.

        The rollouts of this process are the same objects, so that they get their advantages.
        """
        parts = distributed.gather_in_team(self)
        return self if len(parts) == 1 else self.concat(parts)

    def select(self, which: Sequence[int]) -> Self:
        """Some of the rollouts; the metrics are kept as they are."""
        return replace(
            self,
            rollouts=[self.rollouts[i] for i in which],
            logged_columns={name: [values[i] for i in which] for name, values in self.logged_columns.items()},
        )


def joined(generations: Sequence[Collected], *, num_prompts: int) -> list[Rollout]:
    """The rollouts of several generation batches, whose groups get different numbers.

    Args:
        generations: In order. They may have been numbered before, and read from the journal.
        num_prompts: Prompts of a generation batch, over all ranks.
    """
    for i, collected in enumerate(generations):
        for rollout in collected.rollouts:
            rollout.group = rollout.group % num_prompts + i * num_prompts
    return [rollout for collected in generations for rollout in collected.rollouts]


def prompt_seed(seed: int, generation: int, group: int) -> int:
    """The random seed of a prompt's samples. It depends on the run, the generation and the group, not on the rank."""
    return int(np.random.SeedSequence([seed, generation, group]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class Request:
    """Rollouts that were requested."""

    num_prompts: int  # P
    pending: Pending[Rollout]
    seeds: list[int]  # [P] random seed of each prompt's samples
    tickets: list[int] = field(default_factory=list)  # [P] see `GroupPool`; empty: each batch has its own prompts


@dataclass(frozen=True, slots=True)
class Collector:
    """Requests rollouts of prompts, waits for them, and scores them.

    Args:
        rewards: Scores the rollouts.
        sampler: Samples them.
        trainer_state: Returns HuggingFace's state of the current training run, for rewards that ask for it.
        clock: Returns seconds.
        company: Context in which rewards are computed. All ranks enter it the same number of times.
    """

    rewards: RewardRunner
    sampler: RolloutSampler
    trainer_state: Callable[[], object]
    clock: Callable[[], float]
    company: Callable[[], AbstractContextManager[None]] = nullcontext

    def ask(self, rows: Sequence[Mapping[str, Any]], sampling: SamplingParams, seeds: Mapping[int, int]) -> Request:
        """Request rollouts of the prompts of dataset rows.

        Args:
            rows: [P] dataset rows with `prompt` and `prompt_ids`.
            sampling: The sampling parameters; `num_samples` is G.
            seeds: [P] group number of each prompt -> random seed of its samples.
        """
        values = list(seeds.values())
        return Request(len(rows), self.sampler.start(rows, list(seeds), sampling, values), values)

    def collect(self, request: Request) -> Collected:
        """Wait for all rollouts and score them together.

        Returns:
            P * G rollouts in the order of the rows; those of a group are adjacent.

        Raises:
            GenerationError: No completions could be generated.
            EpisodeError: All environments failed.
            RewardError: A reward function failed.
        """
        groups = dict(request.pending.as_completed())
        rollouts = [one for number in range(request.num_prompts) for one in groups[number]]
        if rollouts and all(one.has_failed for one in rollouts):
            raise _all_failed(len(rollouts))
        return self._scored(request, 0, rollouts)

    def by_group(self, request: Request) -> Iterator[Collected]:
        """Like `collect`, but yields each group as soon as its rollouts arrive, and scores it separately."""
        have_failed: list[bool] = []
        for number, rollouts in request.pending.as_completed():
            have_failed += [one.has_failed for one in rollouts]
            yield self._scored(request, number, rollouts)
        if have_failed and all(have_failed):
            raise _all_failed(len(have_failed))

    def _scored(self, request: Request, first: int, rollouts: list[Rollout]) -> Collected:
        """Set rewards and totals of rollouts of the prompts from number `first` on."""
        started, rewards = self.clock(), self.rewards
        scored = [rollout for rollout in rollouts if not rollout.has_failed]
        episodes = [rollout.episode for rollout in scored if rollout.episode is not None]
        for rollout in rollouts:
            rollout.rewards = dict.fromkeys(rewards.names)
        metrics: dict[str, float] = {}
        columns: dict[str, list[Any]] = {}
        with self.company():
            if scored:
                names = [name for name in scored[0].row if name not in ("prompt", "prompt_ids")]
                scores = rewards.score(
                    [rollout.prompt for rollout in scored],
                    [rollout.text for rollout in scored],
                    [rollout.sampled_ids for rollout in scored],
                    {name: [rollout.row[name] for rollout in scored] for name in names},
                    episodes=episodes or None,
                    trainer_state=self.trainer_state(),
                    seed=request.seeds[first],
                )
                for i, rollout in enumerate(scored):
                    rollout.rewards = {name: values[i] for name, values in scores.by_name.items()}
                given = [[math.nan if value is None else value for value in r.rewards.values()] for r in rollouts]
                totals = row_totals(torch.tensor(given, dtype=torch.float32), torch.tensor(rewards.weights))
                for rollout, total in zip(rollouts, totals.tolist(), strict=True):
                    rollout.reward = total  # NaN if all its rewards are None
                places = {id(rollout): i for i, rollout in enumerate(scored)}
                at = [places.get(id(rollout)) for rollout in rollouts]
                metrics = dict(scores.metrics)
                columns = {
                    name: [None if i is None else values[i] for i in at] for name, values in scores.extra.items()
                }
        self.sampler.release(rollouts)
        return Collected(rollouts, metrics, columns, reward_s=self.clock() - started, tickets=request.tickets)


def _all_failed(count: int) -> EpisodeError:
    return EpisodeError(
        f"the environments of all {count} episodes failed, so there is nothing to learn from. The first failure is in "
        "the log"
    )


def add_greedy(collected: Collected, collector: Collector, sampling: SamplingParams) -> None:
    """Set `greedy_reward`: the total reward of one more completion of each prompt, decoded greedily.

    Args:
        collected: Scored rollouts.
        collector: Samples and scores the greedy ones.
        sampling: The parameters that the others were sampled with.
    """
    rows = {rollout.group: rollout.row for rollout in collected.rollouts}
    sampling = replace(sampling, num_samples=1, temperature=0.0)
    asked = collector.ask(list(rows.values()), sampling, dict.fromkeys(rows, 0))
    totals = {rollout.group: rollout.reward for rollout in collector.collect(asked).rollouts}
    for rollout in collected.rollouts:
        rollout.greedy_reward = totals[rollout.group]
