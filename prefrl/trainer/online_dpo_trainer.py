"""Direct preference optimization on pairs of the policy's own completions: a better and a worse one of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.losses.per_token import TokenScores, WantName
from prefrl.losses.preference.pairwise import PAIR_LOSSES
from prefrl.rewards.base import RewardSources
from prefrl.rewards.runner import RewardRunner
from prefrl.rollout.batches import rows_of_parts
from prefrl.rollout.reward_shaping import RunningMoments, shaped
from prefrl.trainer.arguments import check_arguments, named
from prefrl.trainer.configs import OnlineDPOConfig
from prefrl.trainer.offline.preference import RowScores, half_pairs, make_pairs, preference_metrics
from prefrl.trainer.online.learner import Learned, PlainObjective
from prefrl.trainer.online.sampling import OnlineArguments
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.scorer import ScoreNeed, Scores
from prefrl.types import LabeledBatch, LossOutput, ReferencedBatch, Rollout, SampledBatch


class PairObjective(PlainObjective[LabeledBatch, ReferencedBatch]):
    """The pairwise loss, summed over pairs."""

    want: tuple[WantName, ...] = ("entropy", "correct", "mean_logit")
    stage = ReferencedBatch
    splits_groups = False  # its rows are a pair

    def __init__(self, args: OnlineDPOConfig) -> None:
        self.loss = PAIR_LOSSES[args.loss_type]
        self.params = self.loss.params(beta=args.beta)

    def row_items(self, batch: LabeledBatch) -> Tensor:
        """Pairs."""
        return half_pairs(batch)

    def ready(
        self,
        batch: LabeledBatch,
        score: Callable[[LabeledBatch, Collection[ScoreNeed]], Scores],
        *,
        is_first: bool,
    ) -> ReferencedBatch:
        """See `Objective`. The loss compares with the reference, not with the policy that sampled."""
        return ReferencedBatch.of(batch, ref_logprobs=score(batch, {"ref_logprobs"}).ref_logprobs)

    def __call__(self, batch: ReferencedBatch, scores: TokenScores) -> LossOutput:
        """The sum over a micro-batch of whole pairs."""
        policy, reference = RowScores.of(scores.logprobs, batch), RowScores.of(batch.ref_logprobs, batch)
        total = self.loss.function(make_pairs(policy, reference), self.params).sum()
        rewards = self.params.beta * (policy.logps - reference.logps).detach()
        return LossOutput(total, preference_metrics(batch, scores, logps=policy.logps, rewards=rewards))


class PairLearner:
    """Pairs the best and the worst completion of each prompt. If their totals are equal, there is no pair.

    Args:
        args: Options.
        rewards: Not used, because pairs compare total rewards.
    """

    needs: frozenset[ScoreNeed] = frozenset()

    def __init__(self, args: OnlineDPOConfig, rewards: RewardRunner) -> None:
        self.args = args
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
        parts = []
        advantages = [0.0] * len(rollouts)
        for rows_of_part in rows_of_parts(rollouts, self.args, num_parts=num_parts):
            part: list[int] = []
            for rows in _rows_by_group(rollouts, totals, rows_of_part):
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


class OnlineDPOTrainer(OnlineTrainer[ReferencedBatch]):
    """Minimizes -log sigmoid(beta * (log-ratio of the better - log-ratio of the worse completion)).

    Log-ratios are log pi - log pi_ref. The better completion of a prompt is the one with the higher reward. A judge
    that compares completions can serve as a reward, too: `prefrl.rewards.get_judge_reward`.

    Args:
        model: Name, path or instance. An instance is trained in place.
        ref_model: The reference: name, path or instance. None means the model's weights at construction.
        reward_funcs: See `OnlineTrainer`. None means the model that `args.reward_model_path` names.
        args: Options. The default options write to `<model name>-ONLINE_DPO`.
        data: Further arguments in TRL's order: `data_collator`, which must be None, `train_dataset`, `eval_dataset`,
            `processing_class`, `reward_processing_classes`, `peft_config`, `compute_metrics`, `callbacks`,
            `optimizers`.
        arguments: The other arguments of `OnlineTrainer`.

    Raises:
        ConfigError: The options cannot be combined.
        DataError: A dataset cannot be used; the message names the row and the column.

    Source: Guo et al. 2024, arXiv 2402.04792.
    """

    algorithm = "online_dpo"
    config_class = OnlineDPOConfig
    args: OnlineDPOConfig
    learner_class = PairLearner

    def __init__(
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        ref_model: str | Path | PreTrainedModel | None = None,
        reward_funcs: RewardSources | None = None,
        args: OnlineDPOConfig | None = None,
        *data: Any,
        **arguments: Unpack[OnlineArguments],
    ) -> None:
        given = named(type(self), data, arguments)
        check_arguments(type(self), {"model": model, "ref_model": ref_model, **given})
        given.pop("data_collator", None)
        self._ref_model = ref_model
        if reward_funcs is None and args is not None:
            reward_funcs = args.reward_model_path
        super().__init__(model, reward_funcs, args, **given)

    def cut(self, batch: ReferencedBatch, rows_per_micro_batch: int) -> list[ReferencedBatch]:
        """See `BaseTrainer`; never splits a pair. A prompt gives one, whatever `num_generations` is."""
        if self.args.max_tokens_per_micro_batch is not None:
            return batch.split(self.args.max_tokens_per_micro_batch, whole_groups=True)
        return batch.chunks(2 * self.args.per_device_train_batch_size)
