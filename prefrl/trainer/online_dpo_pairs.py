"""Pairs of a better and a worse completion of the same prompt, and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed
from prefrl.losses.preference.pairwise import PAIR_LOSSES
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.trainer.offline.preference import RowScores, make_pairs, preference_metrics
from prefrl.trainer.online.learner import Learned
from prefrl.types import LabeledBatch, LossOutput, ReferencedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.scores import TokenScores, WantName
    from prefrl.metrics import Metric
    from prefrl.rewards.runner import RewardRunner
    from prefrl.trainer.base.scorer import ScoreNeed, Scores
    from prefrl.trainer.online_dpo_config import OnlineDPOConfig
    from prefrl.types import Rollout, SampledBatch

__all__ = ["PairLearner", "PairObjective"]


class PairObjective:
    """The pairwise loss, summed over pairs."""

    want: tuple[WantName, ...] = ("entropy", "correct", "mean_logit")
    stage = ReferencedBatch

    def __init__(self, args: OnlineDPOConfig) -> None:
        self.loss = PAIR_LOSSES[args.loss_type]
        self.params = self.loss.params(beta=args.beta)

    def num_items(self, batch: LabeledBatch) -> Tensor:
        """Pairs."""
        return torch.tensor(batch.num_rows / 2)

    def has_gradient(self, batch: LabeledBatch) -> list[bool]:
        """Every pair has one."""
        return [True] * batch.num_rows

    def prepared(self, batch: LabeledBatch, *, num_items: float) -> LabeledBatch:
        """The batch unchanged: no pair depends on others."""
        return batch

    def metrics_without_pass(self, batch: LabeledBatch) -> dict[str, Metric]:
        """Empty, because every pair has a gradient."""
        return {}

    def ready(
        self,
        batch: LabeledBatch,
        score: Callable[[LabeledBatch, Collection[ScoreNeed]], Scores],
        *,
        is_first: bool,
    ) -> ReferencedBatch:
        """See `Objective`. The loss compares with the reference, not with the policy that sampled."""
        return ReferencedBatch.of(batch, ref_logprobs=score(batch, {"ref_logprobs"}).ref_logprobs)

    def visited(self, batch: ReferencedBatch, logprobs: Tensor) -> ReferencedBatch:
        """The batch unchanged: the loss does not compare with the policy that sampled."""
        return batch

    def __call__(self, batch: ReferencedBatch, scores: TokenScores) -> LossOutput:
        """The sum over a micro-batch of whole pairs."""
        policy, reference = RowScores.of(scores.logprobs, batch), RowScores.of(batch.ref_logprobs, batch)
        total = self.loss.function(make_pairs(policy, reference), self.params).sum()
        rewards = self.params.beta * (policy.logps - reference.logps).detach()
        return LossOutput(total, preference_metrics(batch, scores, logps=policy.logps, rewards=rewards))

    def end_step(self, device: torch.device) -> None:
        """Nothing to do: no weights adapt."""

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Empty: no weights adapt."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing to do: no weights adapt."""


class PairLearner:
    """`Learner` from the best and the worst completion of each prompt. If their totals are equal, there is no pair.

    Args:
        args: Options.
        rewards: Not used, because pairs compare total rewards.
    """

    needs: frozenset[ScoreNeed] = frozenset()

    def __init__(self, args: OnlineDPOConfig, rewards: RewardRunner) -> None:
        self.objective = PairObjective(args)
        self.shaping = args.shaping_params
        self.moments = RunningMoments() if self.shaping.normalize else None

    def advantages(
        self,
        batch: SampledBatch,
        scores: Scores,
        rollouts: Sequence[Rollout],
        *,
        num_parts: int,
        step: int,
        over_ranks: bool,
    ) -> Learned[LabeledBatch]:
        """See `Learner`; the advantage is +1 for chosen rows, -1 for rejected rows and 0 for all others."""
        totals = self._shaped(rollouts, over_ranks=over_ranks)
        size = -(-len(rollouts) // num_parts)
        parts = []
        advantages = [0.0] * len(rollouts)
        for number in range(num_parts):
            part: list[int] = []
            of_part = range(len(rollouts))[number * size : (number + 1) * size]
            for rows in _rows_by_group(rollouts, totals, of_part):
                best, worst = max(rows, key=totals.__getitem__), min(rows, key=totals.__getitem__)
                if totals[best] > totals[worst]:
                    advantages[best], advantages[worst] = 1.0, -1.0
                    if batch.trainable_counts[best] and batch.trainable_counts[worst]:
                        part += [best, worst]
            parts.append(part)
        sides = {1.0: True, -1.0: False, 0.0: None}
        labels = tuple(sides[advantage] for advantage in advantages)
        labeled = LabeledBatch.of(batch, is_preferred=labels, weights=tuple(abs(value) for value in advantages))
        return Learned(labeled, parts, advantages)

    def _shaped(self, rollouts: Sequence[Rollout], *, over_ranks: bool) -> list[float]:
        mine = [(rollout.reward, rollout.finish_reason) for rollout in rollouts]
        everyone, start = distributed.gather_rows(mine, over_ranks=over_ranks)
        rewards, reasons = zip(*everyone, strict=True)
        totals = torch.tensor(rewards, dtype=torch.float64)
        totals = shaped(totals, reasons, self.shaping, moments=self.moments, subtract_mean=False)
        found: list[float] = totals[start : start + len(mine)].tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The running moments of rewards."""
        return {} if self.moments is None else self.moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.moments is not None:
            self.moments.load_state_dict(state)


def _rows_by_group(rollouts: Sequence[Rollout], totals: Sequence[float], rows: Iterable[int]) -> list[list[int]]:
    """Rows with a total reward, by group; groups without such a row are left out."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        if not math.isnan(totals[row]):
            groups.setdefault(rollouts[row].group, []).append(row)
    return list(groups.values())
