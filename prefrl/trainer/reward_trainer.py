"""Reward modeling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack, cast

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.data.collate import reward_batch
from prefrl.data.images import ProcessingClass
from prefrl.data.preference import prepare_reward_dataset
from prefrl.losses.preference.pairwise import bradley_terry, centering
from prefrl.metrics import Max, Mean, Metric, Min
from prefrl.models.classifier import sequence_scores
from prefrl.models.load import load_reward_model
from prefrl.trainer.configs import RewardConfig
from prefrl.trainer.offline.trainer import OfflineTrainer, TrainerArguments
from prefrl.types import LossOutput, MarginBatch, TokenBatch


class RewardTrainer(OfflineTrainer[MarginBatch, MarginBatch]):
    """Minimizes the mean over pairs of -log sigmoid(reward(chosen) - reward(rejected) - margin).

    The model is a sequence classifier with one label, whose score at the last token of a text is the reward. A causal
    or vision-language model given by name gets a classification head.

    Args:
        model: Name, path or instance. An instance is trained in place.
        args: Options. The default options write to `<model name>-Reward`.
        arguments: See `TrainerArguments`. Datasets have preference rows with `prompt`, `chosen` and `rejected`, or
            with `chosen` and `rejected` that start with the same prompt. A column `margin` is optional.

    Source: Bradley and Terry 1952; margin: Touvron et al. 2023 (Llama 2), arXiv 2307.09288, eq. 2; centering:
    Eisenstein et al. 2023, arXiv 2312.09244, eq. 2.
    """

    algorithm = "reward"
    args: RewardConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: RewardConfig | None = None,
        *data: Any,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        super().__init__(model, args, *data, **arguments)
        # Sequence classifiers find the end of a text as the last token that is not the padding token.
        self.policy.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def load_policy(self, model: str | Path | PreTrainedModel | nn.Module, **options: Any) -> PreTrainedModel:
        """The reward model; see `models.load.load_reward_model`."""
        return load_reward_model(model, **options)

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Tokenize."""
        return tokenized_pairs(dataset, processing_class, self.args)

    def lay_out(self, rows: list[dict[str, Any]]) -> MarginBatch:
        """See `data.collate.reward_batch`."""
        return reward_batch(rows, padding_id=self.tokenizer.pad_token_id)

    def _tokens_seen(self, batches: Sequence[TokenBatch]) -> int:
        """See `BaseTrainer`; does not count the extra token at the end of each row."""
        return super()._tokens_seen(batches) - sum(batch.num_rows for batch in batches)

    def rewards(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """[B] rewards of the rows."""
        plan, routers = self.args.forward_plan, self.scorer.routers
        return sequence_scores(model, batch, plan=plan, routers=routers).squeeze(1)

    def forward_sum(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """See `BaseTrainer`."""
        return self.rewards(model, batch).sum()

    def loss(self, model: nn.Module, batch: MarginBatch) -> LossOutput:
        """Sum over pairs."""
        rewards = self.rewards(model, batch)
        rows, other_rows = batch.pair_index
        chosen, rejected = rewards[rows], rewards[other_rows]
        total = bradley_terry(chosen, rejected, batch.on_device(batch.margins)[rows]).sum()
        if self.args.center_rewards_coefficient is not None:
            total = total + self.args.center_rewards_coefficient * centering(chosen, rejected).sum()
        rewards, difference = rewards.detach(), (chosen - rejected).detach()
        metrics: dict[str, Metric] = {
            "min_reward": Min(rewards.min()),
            "mean_reward": Mean(rewards.sum(), batch.num_rows),
            "max_reward": Max(rewards.max()),
            "accuracy": Mean((difference > 0).sum(), len(rows)),
            "margin": Mean(difference.sum(), len(rows)),
        }
        return LossOutput(total=total, metrics=metrics, predictions=rewards)


def tokenized_pairs(dataset: Any, processing_class: ProcessingClass, args: RewardConfig) -> Any:
    """See `data.preference.prepare_reward_dataset`."""
    return prepare_reward_dataset(
        dataset,
        processing_class,
        max_length=args.max_length,
        invalid_rows=args.invalid_rows,
        chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
        num_proc=args.dataset_num_proc,
    )
