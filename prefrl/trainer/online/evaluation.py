"""Evaluation of online trainers: completions of the evaluation prompts, their rewards, and what is told about them."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.errors import ConfigError, reason_of
from prefrl.metrics import Mean, Metric, merge
from prefrl.models.forward import verdict_of
from prefrl.models.modes import eval_mode
from prefrl.models.scoring import prepare_for_scoring
from prefrl.rewards.at_k import PromptSamples, at_k_metrics
from prefrl.rollout.collect import Collected, Collector, add_greedy, prompt_seed
from prefrl.rollout.journal import Entry, write_entry
from prefrl.rollout.summary import log_completions, rollout_metrics
from prefrl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.trainer.configs import OnlineConfig
    from prefrl.trainer.evaluation import PredictedRows

_log = logging.getLogger(__name__)

_NOT_IN_NAMES = r"[^\w.-]"  # of files
_SOURCE = "data_source"  # the column that says where a prompt comes from


def find_routers(policy: PreTrainedModel, device: torch.device) -> None:
    """Try the routers that shall replay, if that was left to the first passes: what servers answer before is not read.

    All processes must call it.
    """
    replay = prepare_for_scoring(policy).replay
    if replay is None or replay.is_proven or replay.is_refused:
        return
    model = policy if distributed.is_sharded(policy) else policy.to(device)
    with torch.no_grad(), eval_mode(model), distributed.usable(model):
        verdict_of(model)
    distributed.release(model)


@dataclass
class EvaluationRollouts:
    """Samples and scores the completions of an evaluation, and keeps them until all are there.

    Args:
        args: Options.
        collector: Turns requested completions into scored rollouts.
        has_loss: Whether these rewards are those of training, so that the loss can be computed from them.

    Raises:
        ConfigError: `pass_at_k_kwargs` names a reward that there is not.
    """

    args: OnlineConfig
    collector: Collector
    has_loss: bool = True
    _kept: list[Collected] = field(default_factory=list)
    _num_prompts: int = 0

    def __post_init__(self) -> None:
        """Check what pass@k is computed from."""
        name, names = self.args.at_k_params.reward, self.collector.rewards.names
        if name is not None and name not in names:
            raise ConfigError(f"pass_at_k_kwargs: reward={name!r}: must be one of {', '.join(names)}, or None")

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
        """Metrics of completions of some prompts. All ranks must call it, even those without prompts."""
        started = self.collector.clock()
        sampling, seeds = self.args.evaluation_sampling_params(), self._seeds(rows)
        place, size = distributed.place_in_team(), distributed.team_size()
        with distributed.without_teams():  # each process samples its part
            # Recovery of a server may need all ranks.
            asked = self.collector.ask(rows[place::size], sampling, dict([*seeds.items()][place::size]))
            own = self.collector.collect(asked)
            if self.args.needs_greedy and self.has_loss:
                add_greedy(own, self.collector, sampling)
        collected = own.of_team()
        self._kept.append(collected)
        if not rows:
            return {}
        seconds = self.collector.clock() - started
        times = {"generation": seconds - own.reward_s, "reward": own.reward_s}
        has_rewards = bool(self.collector.rewards.names)
        metrics = rollout_metrics(collected.rollouts, has_rewards=has_rewards, logged=collected.logged_metrics)
        return metrics | {f"time/{name}_s": Mean(value, 1) for name, value in times.items()}

    def take(self) -> Collected:
        """The rollouts since the last call."""
        kept, self._kept, self._num_prompts = Collected.concat(self._kept), [], 0
        return kept

    def report(self, collected: Collected, *, name: str, step: int) -> dict[str, Metric]:
        """Metrics of all rollouts together; prints and writes some of them. All ranks must call it with theirs.

        Args:
            collected: What `take` returned.
            name: Of the evaluation; "": nothing is printed or written.
            step: Optimizer steps before the evaluation.

        Raises:
            ConfigError: No reward logs the answers that maj@k compares.
        """
        if name:
            self._show(collected, name=name, step=step)
        return self._metrics(collected)

    def _metrics(self, collected: Collected) -> dict[str, Metric]:
        """Mean rewards by source, and pass@k and its relatives."""
        metrics: dict[str, Metric] = {}
        for rollout in collected.rollouts:
            source = _source_of(rollout)
            if source and not math.isnan(rollout.reward):
                merge(metrics, {f"reward/{source}": Mean(rollout.reward, 1)})
        sizes = self.args.at_k_params.k
        if not sizes:
            return metrics
        parts = distributed.gather_on_main(self._samples(collected))
        if parts is not None:  # those of all ranks
            prompts = [prompt for part in parts for prompt in part]
            metrics |= {name: Mean(value, 1) for name, value in at_k_metrics(prompts, sizes).items()}
        return metrics

    def _samples(self, collected: Collected) -> list[PromptSamples]:
        """The completions of each prompt that have the reward that counts."""
        groups: dict[int, list[tuple[Rollout, Any]]] = {}
        for rollout, answer in zip(collected.rollouts, self._answers(collected), strict=True):
            groups.setdefault(rollout.group, []).append((rollout, answer))
        return [self._samples_of(group) for group in groups.values()]

    def _answers(self, collected: Collected) -> Sequence[Any]:
        """The answer in each completion; None: there is none."""
        name, columns = self.args.at_k_params.answer, collected.logged_columns
        if name in columns:
            return columns[name]
        if name is not None and any(not math.isnan(rollout.reward) for rollout in collected.rollouts):
            logged = ", ".join(columns) or "nothing"
            raise ConfigError(
                f"pass_at_k_kwargs: answer={name!r}: no reward logs this column; they log {logged}. "
                "Call log_extra in a reward, or set answer=None, which leaves out maj@k."
            )
        return [None] * len(collected.rollouts)

    def _samples_of(self, group: Sequence[tuple[Rollout, Any]]) -> PromptSamples:
        params = self.args.at_k_params
        able = [(rollout, answer) for rollout, answer in group if not math.isnan(rollout.reward)]
        decisive = [r.reward if params.reward is None else r.rewards[params.reward] for r, _ in able]
        scored = [(*pair, value) for pair, value in zip(able, decisive, strict=True) if value is not None]
        return PromptSamples(
            _source_of(group[0][0]),
            tuple(rollout.reward for rollout, _, _ in scored),
            tuple(value >= params.threshold for _, _, value in scored),
            () if params.answer is None else tuple("" if answer is None else str(answer) for _, answer, _ in scored),
        )

    def _show(self, collected: Collected, *, name: str, step: int) -> None:
        """Print `log_val_generations` completions and write them to a file; if that fails, it is a warning.

        The prompts are a fixed random choice, one completion of each as long as there are prompts.
        """
        limit = self.args.log_val_generations
        if limit == 0:
            return
        parts = distributed.gather_on_main(_first(collected, limit))
        if parts is None:
            return
        every = _first(Collected.concat(parts), limit)
        log_completions(every.rollouts, title=f"Completions of {name} after step {step}")
        path = Path(self.args.output_dir, "evaluations", f"{re.sub(_NOT_IN_NAMES, '_', name)}_{step:05d}.parquet")
        try:
            write_entry(Entry("", 0, step, [every]), path)
        except OSError as error:
            _log.warning("The completions of %s could not be written to %s: %s", name, path, reason_of(error))

    def _seeds(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Group number, unique over all ranks, -> random seed. A prompt has the same seed on whichever rank it is."""
        first, self._num_prompts = self._num_prompts, self._num_prompts + len(rows)
        numbers = range(first, self._num_prompts)
        groups = [distributed.rank() + distributed.world_size() * number for number in numbers]
        hashes = [_hash(row["prompt_ids"]) for row in rows]
        return {group: prompt_seed(self.args.seed, 0, value) for group, value in zip(groups, hashes, strict=True)}


def add_rollouts(predicted: PredictedRows, rollouts: Sequence[Rollout]) -> None:
    """Add completions, their rewards and their dataset rows to what `compute_metrics` gets."""
    predicted.add([r.text for r in rollouts], [r.reward for r in rollouts], [r.row for r in rollouts])


def _source_of(rollout: Rollout) -> str:
    """Where its prompt comes from; "" if that is not known."""
    source = rollout.row.get(_SOURCE)
    return "" if source is None else str(source)


def _hash(prompt_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(prompt_ids).encode())


def _first(collected: Collected, limit: int) -> Collected:
    """The first completion of each prompt in the order of the prompts' hashes, then the second ones, and so on."""
    places: list[tuple[int, int]] = []
    counts: dict[int, int] = {}
    for rollout in collected.rollouts:
        places.append((counts.get(rollout.group, 0), _hash(rollout.row["prompt_ids"])))
        counts[rollout.group] = counts.get(rollout.group, 0) + 1
    return collected.select(sorted(range(len(places)), key=places.__getitem__)[:limit])
