"""Evaluation of online trainers: completions of the evaluation prompts, their rewards, and their loss."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.metrics import Mean, Metric
from prefrl.rollout.collect import Collector, add_greedy, ask, prompt_seed
from prefrl.rollout.summary import collected_metrics
from prefrl.types import Rollout

if TYPE_CHECKING:
    from prefrl.trainer.online.config import OnlineConfig

__all__ = ["EvaluationRollouts"]


@dataclass
class EvaluationRollouts:
    """Samples and scores the completions of an evaluation, and keeps them for its loss.

    Args:
        args: Options.
        collector: Turns requested completions into scored rollouts.
    """

    args: OnlineConfig
    collector: Collector
    _kept: list[Rollout] = field(default_factory=list)
    _num_prompts: int = 0

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
        """Metrics of completions of some prompts. All ranks must call it, even those without prompts."""
        started = self.collector.clock()
        sampling = self.args.sampling_params(evaluation=True)
        # Recovery of a server may need all ranks.
        collected = self.collector.collect(
            ask(rows, sampler=self.collector.sampler, sampling=sampling, seeds=self._seeds(rows))
        )
        if self.args.needs_greedy:
            add_greedy(collected, self.collector, sampling)
        self._kept += collected.rollouts
        if not rows:
            return {}
        seconds = self.collector.clock() - started
        times = {"generation": seconds - collected.reward_s, "reward": collected.reward_s}
        return collected_metrics(collected) | {f"time/{name}_s": Mean(value, 1) for name, value in times.items()}

    def take(self) -> list[Rollout]:
        """The rollouts since the last call."""
        kept, self._kept, self._num_prompts = self._kept, [], 0
        return kept

    def _seeds(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Group number, unique over all ranks, -> random seed. A prompt has the same seed on whichever rank it is."""
        first, self._num_prompts = self._num_prompts, self._num_prompts + len(rows)
        numbers = range(first, self._num_prompts)
        groups = [distributed.rank() + distributed.world_size() * number for number in numbers]
        hashes = [zlib.crc32(repr(row["prompt_ids"]).encode()) for row in rows]
        return {group: prompt_seed(self.args.seed, 0, value) for group, value in zip(groups, hashes, strict=True)}
