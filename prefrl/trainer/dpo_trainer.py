"""Direct preference optimization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from prefrl.losses.preference.pairwise import PAIR_LOSSES, Pairs, rpo_nll
from prefrl.metrics import Mean
from prefrl.trainer.arguments import check_arguments
from prefrl.trainer.offline.loss_balance import LossBalance
from prefrl.trainer.offline.preference import (
    RowScores,
    StepPairs,
    make_pairs,
    pair_groups,
    pair_weights,
    pairs_per_chosen_token,
    preference_metrics,
)
from prefrl.trainer.offline.rows import RunningMean
from prefrl.trainer.offline.trainer import OfflineTrainer, TrainerArguments
from prefrl.types import LabeledBatch, LossOutput, ReferencedBatch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.losses.per_token import TokenScores, WantName
    from prefrl.trainer.configs import DPOConfig


class DPOTrainer(OfflineTrainer[LabeledBatch, ReferencedBatch]):
    """Minimizes the mean over pairs of -log sigmoid(beta (log r(chosen) - log r(rejected))), r = policy / reference.

    `loss_type` chooses other losses of the same log-ratios; several losses are added with their weights.

    Args:
        model: Name, path or instance. An instance is trained in place.
        ref_model: The reference. By default, it is the model's weights at construction.
        args: Options. The default options write to `<model name>-DPO`.
        arguments: See `TrainerArguments`. Datasets have preference rows with `prompt`, `chosen` and `rejected`, or
            with `chosen` and `rejected` that start with the same prompt.

    Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; for other losses see `losses/preference/pairwise.py`.
    """

    algorithm = "dpo"
    args: DPOConfig
    _plain = ("sft", "rpo")  # losses of full sums of log-probs, without ld_alpha
    _step_pairs: StepPairs  # all pairs of the current step, for losses that sort them

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        ref_model: str | Path | PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        *data: Any,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        check_arguments(type(self), {"model": model, "ref_model": ref_model, "args": args})
        super().__init__(model, args, *data, **arguments)
        self.set_up_reference(ref_model)
        if "bco_pair" in self.args.loss_type:
            self.reward_mean = RunningMean(self.args.device)
        self._losses = self.args.weighted_losses
        if self.args.loss_balance is not None:
            params = self.args.loss_balance_params
            self.loss_balance = LossBalance(self.args.loss_balance, params, self._losses, self._each)
        self._loss_params = {name: PAIR_LOSSES[name].params.from_options(self.args) for name in self.args.loss_type}
        self._pairs_per_chosen_token = 0.0

    def _each(self, batch: ReferencedBatch, logprobs: Tensor) -> list[Tensor]:
        policy, _, pairs = self._compared(logprobs, batch)
        plain = replace(pairs, chosen_logps=policy.sums[batch.pair_index[0]])
        sides = [plain if name in self._plain else pairs for name, _ in self._losses]
        return [self._loss(name, side, None, batch) for (name, _), side in zip(self._losses, sides, strict=True)]

    def prepare_step(self, batches: list[LabeledBatch]) -> list[ReferencedBatch]:
        """See `OfflineTrainer`; also computes what some losses need to know about all pairs of the step."""
        scored = self.with_reference(batches)
        if "sft" in self.args.loss_type:
            self._pairs_per_chosen_token = pairs_per_chosen_token(scored, self.args.device)
        if any(PAIR_LOSSES[name].is_batch_loss for name in self.args.loss_type):
            self._step_pairs = self._all_pairs(scored)
        return scored

    def _all_pairs(self, batches: list[ReferencedBatch]) -> StepPairs:
        logprobs = self.logprobs_of_step(self.scorer.of_policy, batches)
        parts = [self._compared(policy, batch)[2] for policy, batch in zip(logprobs, batches, strict=True)]
        return StepPairs(parts, [group for batch in batches for group in pair_groups(batch)])

    def _compared(self, logprobs: Tensor, batch: ReferencedBatch) -> tuple[RowScores, RowScores, Pairs]:
        """The rows under the policy, from its [N] log-probs, and under the reference; and the pairs of both."""
        policy, reference = (
            RowScores.of(each, batch, ld_alpha=self.args.ld_alpha) for each in (logprobs, batch.ref_logprobs)
        )
        pairs = replace(
            make_pairs(policy, reference),
            divergence=self.args.f_divergence_type,
            alpha=self.args.f_alpha_divergence_coef,
            reward_shift=0.0 if self.reward_mean is None else self.reward_mean.value,
        )
        return policy, reference, pairs

    def loss(self, model: nn.Module, batch: ReferencedBatch) -> LossOutput:
        """Sum over pairs of the weighted losses."""
        weighting: list[WantName] = ["log_collision"] if self.args.use_weighting else []
        scores = self.scorer.scores(model, batch, want=("entropy", "correct", "mean_logit", *weighting))
        policy, reference, pairs = self._compared(scores.logprobs, batch)
        plain = replace(pairs, chosen_logps=policy.sums[batch.pair_index[0]])
        total = torch.zeros((), device=batch.device)
        balance = self.loss_balance if model.training else None
        weighted = self._losses if balance is None else balance.weighted
        for name, weight in weighted:
            total = total + weight * self._loss(name, plain if name in self._plain else pairs, scores, batch).sum()
        rewards = self.args.beta * (policy.logps - reference.logps).detach()
        if self.reward_mean is not None and model.training:
            self.reward_mean.add(rewards)
        metrics = preference_metrics(batch, scores, logps=policy.logps, rewards=rewards)
        if balance is not None:
            metrics |= {f"loss_balance/{name}": Mean(weight, 1) for name, weight in weighted}
        return LossOutput(total=total, metrics=metrics, predictions=rewards)

    def _loss(self, name: str, pairs: Pairs, scores: TokenScores | None, batch: LabeledBatch) -> Tensor:
        """[P] one loss, with `scores` weighted by `use_weighting`; its sum if it sorts the pairs."""
        if name == "rpo":
            return rpo_nll(pairs)
        row, params = PAIR_LOSSES[name], self._loss_params[name]
        if row.is_batch_loss:
            return self._step_pairs.loss(lambda everyone: row.function(everyone, params), pairs, pair_groups(batch))
        losses: Tensor = row.function(pairs, params)
        if name == "sft":  # a mean over tokens, although the step's sum is divided by the number of pairs
            losses = losses * self._pairs_per_chosen_token
        return losses * pair_weights(scores, batch) if self.args.use_weighting and scores is not None else losses
