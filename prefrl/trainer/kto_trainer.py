"""Kahneman-Tversky optimization."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Unpack

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.data.collate import unpaired_batch
from prefrl.data.images import ProcessingClass
from prefrl.losses.preference.unpaired import kto
from prefrl.metrics import Mean
from prefrl.trainer.arguments import check_arguments
from prefrl.trainer.configs import KTOConfig
from prefrl.trainer.offline.preference import RowScores, preference_metrics, prepare_unpaired, sided_rows
from prefrl.trainer.offline.rows import predicted_rows
from prefrl.trainer.offline.trainer import OfflineTrainer, TrainerArguments
from prefrl.types import LabeledBatch, LossOutput, ReferencedBatch

logger = logging.getLogger(__name__)


class KTOTrainer(OfflineTrainer[LabeledBatch, ReferencedBatch]):
    """Minimizes the mean over rows of weight * (1 - sigmoid(+-beta (log r - KL))), + for desirable rows.

    r = policy / reference; KL = max(0, mean of log r over mismatched rows, prompts with the completion of another
    prompt), one number for the whole optimizer step.

    Args:
        model: Name, path or instance. An instance is trained in place.
        ref_model: The reference. By default, it is the model's weights at construction.
        args: Options. The default options write to `<model name>-KTO`.
        arguments: See `TrainerArguments`. Datasets have unpaired rows with `prompt`, `completion` and `label`, or
            preference rows, each of which is split into two unpaired rows.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8; apo_zero_unpaired: D'Oosterlinck et al. 2024, arXiv
    2408.06266.
    """

    algorithm = "kto"
    args: KTOConfig
    predictions_of = staticmethod(predicted_rows)
    lay_out = staticmethod(unpaired_batch)

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        ref_model: str | Path | PreTrainedModel | None = None,
        args: KTOConfig | None = None,
        *data: Any,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        check_arguments(type(self), {"model": model, "ref_model": ref_model, "args": args})
        super().__init__(model, args, *data, **arguments)
        self.set_up_reference(ref_model)
        self._kl = torch.zeros((), device=self.args.device)
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        if self._estimates_kl and rows * distributed.world_size() == 1 and distributed.is_main():
            logger.warning(
                "per_device_train_batch_size=1 and gradient_accumulation_steps=1: KTO's KL is estimated from one row, "
                "which is very noisy. Raise one of them."
            )

    @property
    def _estimates_kl(self) -> bool:
        return self.args.loss_type == "kto"

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Tokenize, and add to each row the completion of another prompt for the KL estimate."""
        return prepare_unpaired(dataset, processing_class, self.args, with_mismatched=self._estimates_kl)

    def row_items(self, batch: LabeledBatch) -> Tensor:
        """Rows with a label."""
        return batch.on_device([float(side is not None) for side in batch.is_preferred])

    def prepare_step(self, batches: list[LabeledBatch]) -> list[ReferencedBatch]:
        """See `OfflineTrainer`; also estimates the KL of the step, and leaves its rows out of the training pass."""
        scored = self.with_reference(batches)
        if self._estimates_kl:
            self._kl = self._estimated_kl(scored)
        return [batch.select(sided_rows(batch)) for batch in scored]

    def _estimated_kl(self, batches: list[ReferencedBatch]) -> Tensor:
        """[] max(0, mean over mismatched rows of all ranks of log policy - log reference), in nats, on the device."""
        unsided = [(batch, sorted(set(range(batch.num_rows)) - set(sided_rows(batch)))) for batch in batches]
        parts = [batch.select(rows) for batch, rows in unsided if rows]
        log_ratio = torch.zeros((), device=self.args.device)
        for batch, logprobs in zip(parts, self.logprobs_of_step(self.scorer.of_policy, parts), strict=True):
            part = ((logprobs - batch.ref_logprobs) * batch.trainable).sum()
            log_ratio += part.to(log_ratio.device, non_blocking=True)
        count = log_ratio.new_full((), sum(batch.num_rows for batch in parts))
        total, all_rows = distributed.summed_over_ranks(torch.stack([log_ratio, count])).unbind()
        return (total / all_rows.clamp(min=1.0)).clamp(min=0.0)

    def loss(self, model: nn.Module, batch: ReferencedBatch) -> LossOutput:
        """Weighted sum over rows."""
        scores = self.scorer.scores(model, batch, want=("entropy", "mean_logit"))
        policy = RowScores.of(scores.logprobs, batch)
        log_ratio = policy.logps - RowScores.of(batch.ref_logprobs, batch).logps
        is_desirable = batch.preferred
        losses = kto(log_ratio, is_desirable, beta=self.args.beta, kl=self._kl.to(log_ratio.device))
        weights = torch.where(is_desirable, self.args.desirable_weight, self.args.undesirable_weight)
        total = (weights * losses).sum()
        rewards = self.args.beta * log_ratio.detach()
        metrics = preference_metrics(batch, scores, logps=policy.logps, rewards=rewards)
        metrics["kl"] = Mean(self._kl * batch.num_rows, batch.num_rows)
        return LossOutput(total=total, metrics=metrics, predictions=rewards)
