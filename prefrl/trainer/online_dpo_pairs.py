"""Pairs of completions of one prompt, the better and the worse, and their loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.losses.preference.pairwise import PAIR_LOSSES
from prefrl.rollout.buffer import Minibatch
from prefrl.rollout.collect import to_token_batch
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.trainer.offline.preference import RowScores, make_pairs, preference_metrics
from prefrl.types import LossOutput, Rollout, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.logprobs import TokenScores, WantName
    from prefrl.trainer.online.trainer import OnlineTrainer
    from prefrl.trainer.online_dpo_config import OnlineDPOConfig

__all__ = ["PairExperience", "PairObjective"]


class PairObjective:
    """Sum over pairs of the loss."""

    want: tuple[WantName, ...] = ("entropy", "correct", "mean_logit")
    reads_ref_hidden = False
    learns_from_zero_advantage = True

    def __init__(self, args: OnlineDPOConfig) -> None:
        self.args = args

    def num_items(self, batch: TokenBatch) -> Tensor:
        """Pairs."""
        return torch.tensor(batch.num_rows / 2)

    def __call__(self, batch: TokenBatch, scores: TokenScores, old_logprobs: Tensor) -> LossOutput:
        """The sum over a micro-batch of whole pairs; `old_logprobs` are not read."""
        assert batch.ref_logprobs is not None
        policy, reference = RowScores.of(scores.logprobs, batch), RowScores.of(batch.ref_logprobs, batch)
        pairs = make_pairs(policy, reference, divergence="reverse_kl", alpha=0.0)
        row = PAIR_LOSSES[self.args.loss_type]
        values = {"beta": self.args.beta, "label_smoothing": 0.0}
        total = row.function(pairs, **{name: values[name] for name in row.hyperparameters}).sum()
        rewards = self.args.beta * (policy.logps - reference.logps).detach()
        return LossOutput(total, preference_metrics(batch, scores, logps=policy.logps, rewards=rewards))

    def end_step(self, device: torch.device) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Nothing moves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing moves."""


class PairExperience:
    """Makes minibatches of the best and the worst completion of each prompt; equal ones make no pair.

    Args:
        trainer: Scores tokens, knows rewards and options.
        args: Options.
    """

    def __init__(self, trainer: OnlineTrainer, args: OnlineDPOConfig) -> None:
        self.trainer = trainer
        self.args = args
        self.moments = RunningMoments() if args.normalize_rewards else None

    def minibatches(self, rollouts: list[Rollout], *, num_parts: int, over_ranks: bool = True) -> list[Minibatch]:
        """See `OnlineTrainer.minibatches`; `advantage` is +1 for chosen rows, -1 for rejected ones, 0 for others."""
        self.trainer.set_totals(rollouts)
        totals = self._shaped(rollouts, over_ranks=over_ranks)
        size = -(-len(rollouts) // num_parts)
        parts = [range(start, min(start + size, len(rollouts))) for start in range(0, len(rollouts), size)]
        return [
            self._minibatch([rollouts[row] for row in part], [totals[row] for row in part], over_ranks=over_ranks)
            for part in parts
        ]

    def _shaped(self, rollouts: Sequence[Rollout], *, over_ranks: bool) -> list[float]:
        mine = [(rollout.reward, rollout.completion.finish_reason) for rollout in rollouts]
        everyone, start = distributed.gather_rows(mine, over_ranks=over_ranks)
        rewards, reasons = zip(*everyone, strict=True)
        totals = torch.tensor(rewards, dtype=torch.float64)
        shaping = self.args.shaping_hyperparameters
        totals = shaped(totals, reasons, moments=self.moments, subtract_mean=False, **shaping)
        found: list[float] = totals[start : start + len(mine)].tolist()
        return found

    def _minibatch(self, rollouts: Sequence[Rollout], totals: Sequence[float], *, over_ranks: bool) -> Minibatch:
        chosen, rejected = [], []
        for rollout in rollouts:
            rollout.advantage = 0.0
        for rows in _rows_by_group(rollouts, totals):
            best, worst = max(rows, key=totals.__getitem__), min(rows, key=totals.__getitem__)
            if totals[best] > totals[worst]:
                chosen.append(best)
                rejected.append(worst)
                rollouts[best].advantage, rollouts[worst].advantage = 1.0, -1.0
        rows = [row for pair in zip(chosen, rejected, strict=True) for row in pair]
        batch = to_token_batch(rollouts, mask_truncated=self.args.mask_truncated_completions)
        batch = batch.select(rows).replace(is_preferred=tuple([True, False] * len(chosen)))
        batch = batch.select(_whole_pairs(batch))
        num_items = batch.num_rows / 2
        if over_ranks:
            batch = self.trainer.dealt(batch)
        max_tokens = self.trainer.frozen.budget(batch.largest_chunk(self.args.per_device_train_batch_size))
        batch = self.trainer.with_reference(batch, max_tokens=max_tokens)
        return Minibatch(self.trainer.cut(batch, self.args.per_device_train_batch_size), num_items)

    def state_dict(self) -> dict[str, Any]:
        """Running moments of rewards."""
        return {} if self.moments is None else self.moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if self.moments is not None:
            self.moments.load_state_dict(state)


def _rows_by_group(rollouts: Sequence[Rollout], totals: Sequence[float]) -> list[list[int]]:
    """Rows that have a total, of each group that has one."""
    groups: dict[int, list[int]] = {}
    for row, (rollout, total) in enumerate(zip(rollouts, totals, strict=True)):
        if not math.isnan(total):
            groups.setdefault(rollout.group, []).append(row)
    return list(groups.values())


def _whole_pairs(batch: TokenBatch) -> list[int]:
    """Rows of pairs of which both have a trainable token."""
    counts = batch.trainable_counts
    return [row for row in range(batch.num_rows) if counts[row - row % 2] and counts[row - row % 2 + 1]]
