"""Direct preference optimization on pairs of the policy's own completions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from prefrl.trainer.base.arguments import check_arguments, named
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.online_dpo_config import OnlineDPOConfig
from prefrl.trainer.online_dpo_pairs import PairLearner
from prefrl.types import ReferencedBatch

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from prefrl.rewards.base import RewardSource
    from prefrl.trainer.online.arguments import OnlineArguments

__all__ = ["OnlineDPOTrainer"]


class OnlineDPOTrainer(OnlineTrainer[ReferencedBatch]):
    """Minimizes -log sigmoid(beta * (log-ratio of the better - log-ratio of the worse completion)).

    Log-ratios are log pi - log pi_ref; the better completion of a prompt is the one with the higher reward. A judge
    that compares completions can serve as a reward, too: `prefrl.rewards.get_judge_reward`.

    Args:
        model: Name, path or instance; trained in place.
        ref_model: The reference: name, path or instance; None: the model's weights at construction.
        reward_funcs: See `OnlineTrainer`.
        args: Options; None: the defaults, in `<model name>-ONLINE_DPO`.
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
        reward_funcs: RewardSource | list[RewardSource] | None = None,
        args: OnlineDPOConfig | None = None,
        *data: Any,
        **arguments: Unpack[OnlineArguments],
    ) -> None:
        given = named(type(self), data, arguments)
        check_arguments(type(self), {"model": model, "ref_model": ref_model, **given})
        given.pop("data_collator", None)
        self._ref_model = ref_model
        super().__init__(model, reward_funcs, args, **given)

    def cut(self, batch: ReferencedBatch, rows_per_micro_batch: int) -> list[ReferencedBatch]:
        """See `BaseTrainer`; never splits a pair. A prompt gives one, whatever `num_generations` is."""
        if self.args.max_tokens_per_micro_batch is not None:
            return batch.split(self.args.max_tokens_per_micro_batch, whole_groups=True)
        return batch.chunks(2 * self.args.per_device_train_batch_size)
