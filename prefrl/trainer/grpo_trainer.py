"""Group relative policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from prefrl.losses.advantages import Advantages, group_advantages
from prefrl.losses.kl import k3
from prefrl.losses.policy import POLICY_LOSSES, sequence_log_ratio
from prefrl.losses.reduce import item_count, token_weights
from prefrl.trainer.base_trainer import Optimizers
from prefrl.trainer.grpo_config import GRPOConfig
from prefrl.trainer.online_trainer import OnlineTrainer, clip_metrics, token_mean
from prefrl.trainer.options import default_output_dir
from prefrl.trainer.sampling_correction import correct_sampling
from prefrl.types import LossOutput, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from prefrl.rewards.base import RewardSource

__all__ = ["GRPOTrainer"]

# Added to the standard deviation, as in TRL.
_EPSILON = 1e-4


class GRPOTrainer(OnlineTrainer):
    """Minimises -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta * KL(pi || ref) over sampled tokens.

    r = exp(log pi - log pi_old); A = (reward - mean of its group) / (standard deviation + 1e-4); KL is Schulman's k3.

    Args:
        model: Name, path or instance; trained in place.
        reward_funcs: One or several of: a function `f(prompts, completions, completion_ids, **columns)`, the name or
            instance of a sequence-classification model.
        args: Options; None: the defaults, in `<model name>-GRPO`.
        train_dataset: Rows with `prompt` (text or messages) and the columns that the rewards read.
        eval_dataset: One dataset, or several by name.
        processing_class: Tokenizer; None: the model's.
        reward_processing_classes: Tokenizers of reward models; None: their own.
        callbacks: HuggingFace callbacks.
        optimizers: Optimizer and scheduler to use instead of those that `args` describes.
        peft_config: Train an adapter of this kind instead of the model.
        quantization_config: Load the model, given by name, quantised; needs an adapter.

    Raises:
        ConfigError: Options that cannot work together.
        DataError: A dataset that cannot be used; names the row and the column.
        RewardError: A reward failed, during training.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3; Yu et al. 2025 (DAPO), arXiv 2503.14476; Liu et
    al. 2025 (Dr. GRPO), arXiv 2503.20783; Zheng et al. 2025 (GSPO), arXiv 2507.18071.
    """

    algorithm = "grpo"

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: RewardSource | list[RewardSource],
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: PeftConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args or GRPOConfig(output_dir=default_output_dir(model, "GRPO")),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            quantization_config=quantization_config,
        )

    def advantages(self, rewards: Tensor, groups: Tensor) -> Advantages:
        """See `losses.advantages.group_advantages`."""
        return group_advantages(
            rewards,
            torch.tensor(self.rewards.weights),
            groups,
            scale=self.args.scale_rewards,
            aggregation=self.args.multi_objective_aggregation,
            epsilon=_EPSILON,
        )

    @property
    def learns_from_zero_advantage(self) -> bool:
        """Only through the KL term."""
        return self.args.beta > 0

    def num_items(self, batch: TokenBatch) -> Tensor:
        """Tokens, sequences or a constant, as the loss asks."""
        reduction = POLICY_LOSSES[self.args.loss_type].reduction
        return item_count(
            batch.trainable,
            batch.row_index,
            batch.num_rows,
            reduction=reduction,
            constant=self.args.max_completion_length if reduction == "constant" else None,
        )

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossOutput:
        """Weighted sum of the clipped surrogate and the KL term."""
        policy_loss = POLICY_LOSSES[self.args.loss_type]
        assert batch.advantages is not None
        scores = self.score(model, batch, want=("entropy",))
        assert scores.entropy is not None
        old_logprobs = self.old_logprobs(batch, scores)
        log_ratio = scores.logprobs - old_logprobs
        if self.args.importance_sampling_level == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, batch.trainable, batch.row_index, batch.num_rows)
        token = policy_loss.function(
            log_ratio,
            batch.advantages,
            clip_low=self.args.epsilon,
            clip_high=self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high,
            delta=self.args.delta,
        )
        metrics = clip_metrics(token.stats, batch) | {"entropy": token_mean(scores.entropy.detach(), batch)}
        per_token = token.loss
        if self.args.corrects_sampling:
            correction = correct_sampling(self.args, batch, old_logprobs)
            per_token = correction.weights * per_token
            metrics |= correction.metrics
        if batch.ref_logprobs is not None:
            kl = k3(scores.logprobs, batch.ref_logprobs)
            per_token = per_token + self.args.beta * kl
            metrics["kl"] = token_mean(kl.detach(), batch)
        weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction=policy_loss.reduction)
        return LossOutput(total=(weights * per_token).sum(), metrics=metrics)
