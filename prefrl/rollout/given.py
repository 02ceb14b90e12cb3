"""Completions that a dataset gives: rollouts that nobody samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefrl.generation.base import Pending, SamplingParams
from prefrl.rollout.collect import RolloutSampler
from prefrl.types import Completion, Rollout, Turn


@dataclass(frozen=True, slots=True)
class GivenCompletions:
    """Takes some completions from the dataset, and samples the others.

    Whether a prompt's completion is taken depends on its seed alone. Rows without the columns of
    `data.tokenize.with_given_ids`, such as those of evaluations, are always sampled.

    Args:
        sampler: Samples rollouts.
        fraction: Probability that a completion is sampled.
        max_prompt_length: Tokens of a prompt, whose beginning is cut off; None: no limit.
    """

    sampler: RolloutSampler
    fraction: float
    max_prompt_length: int | None

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """See `RolloutSampler`."""
        # Not the generator that samples: its numbers would say something about the completion.
        is_given = [
            "given_ids" in row and np.random.default_rng([seed, 1]).random() >= self.fraction
            for row, seed in zip(rows, seeds, strict=True)
        ]
        given = {i: self._rollout(rows[i], groups[i], sampling.max_tokens) for i, flag in enumerate(is_given) if flag}
        asked = [i for i, flag in enumerate(is_given) if not flag]
        pending = self.sampler.start(
            [rows[i] for i in asked], [groups[i] for i in asked], sampling, [seeds[i] for i in asked]
        )
        return _Joined(given, asked, pending)

    def _rollout(self, row: Mapping[str, Any], group: int, max_tokens: int) -> Rollout:
        ids, flags = list(row["given_ids"]), list(row["given_trainable"])
        start = flags.index(True)
        stop = min(len(ids), start + max_tokens)
        first = 0 if self.max_prompt_length is None else max(start - self.max_prompt_length, 0)
        completion = Completion(
            ids[start:stop],
            "stop" if stop == len(ids) else "length",
            logprobs=[0.0] * (stop - start),
            trainable=flags[start:stop],
            policy_versions=[],
        )
        turn = Turn(ids[first:start], completion)
        return Rollout([turn], row, group, prompt=row["prompt"], text=row["completion"])

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """See `RolloutSampler`."""
        self.sampler.release(rollouts)

    def close(self) -> None:
        """See `RolloutSampler`."""
        self.sampler.close()


@dataclass(frozen=True, slots=True)
class _Joined:
    """Given rollouts, and the requested others."""

    given: Mapping[int, Rollout]
    asked: Sequence[int]  # the number of each prompt of `pending`
    pending: Pending[Rollout]

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        for number, rollout in self.given.items():
            yield number, [rollout]
        for number, rollouts in self.pending.as_completed():
            yield self.asked[number], rollouts

    def cancel(self) -> None:
        self.pending.cancel()
