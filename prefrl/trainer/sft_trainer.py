"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack, cast

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.data.collate import sft_batch
from prefrl.data.formats import get_dataset_column_names, has_columns, map_anew
from prefrl.data.images import ProcessingClass
from prefrl.data.packing import pack_prepared
from prefrl.data.tokenize import prepare_sft_dataset
from prefrl.errors import ConfigError, DataError
from prefrl.losses.per_token import WantName, row_items, token_weights
from prefrl.losses.supervised import SUPERVISED_LOSSES
from prefrl.metrics import Mean, Metric
from prefrl.options.types import TRUNCATION_SIDES
from prefrl.trainer.arguments import named
from prefrl.trainer.configs import SFTConfig
from prefrl.trainer.offline.rows import predicted_tokens
from prefrl.trainer.offline.trainer import OfflineTrainer, TrainerArguments
from prefrl.types import LossOutput, TokenBatch


class SFTTrainer(OfflineTrainer[TokenBatch, TokenBatch]):
    """Minimizes the mean of -log pi(token), or of its DFT variant, over all trained tokens.

    Args:
        model: Name, path or instance. An instance is trained in place.
        args: Options. The default options write to `<model name>-SFT`.
        formatting_func: Turns a dataset row into text.
        arguments: See `TrainerArguments`. Datasets have rows for language modeling (`text` or `messages`),
            prompt-completion rows (`prompt`, `completion`), or rows of token ids (`input_ids`).

    Source: dft is Wu et al. 2025, arXiv 2508.05629, eq. 9.
    """

    algorithm = "sft"
    args: SFTConfig
    predictions_of = staticmethod(predicted_tokens)
    lay_out = staticmethod(sft_batch)

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: SFTConfig | None = None,
        *data: Any,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        own = {} if formatting_func is None else {"formatting_func": formatting_func}
        given = named(type(self), data, {**arguments, **own})
        self.formatting_func = given.pop("formatting_func", None)
        super().__init__(model, args, **given)

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Tokenize, mask, truncate and pack."""
        if has_columns(dataset, ("input_ids",)) and self.formatting_func is not None:
            raise ConfigError(
                "formatting_func with a dataset of token ids (it has a column 'input_ids'): there is no text to "
                "format. Remove one of them."
            )
        if training and self.args.shuffle_dataset:
            dataset = dataset.shuffle(seed=self.args.seed)
        if self.formatting_func is not None:
            field, others = self.args.dataset_text_field, get_dataset_column_names(dataset)
            dataset = map_anew(dataset, self.formatting_func, "formatting_func", field, remove_columns=others)
        is_packed = self.args.packing if training or self.args.eval_packing is None else self.args.eval_packing
        dataset = tokenized_texts(dataset, processing_class, self.args, is_packed=is_packed)
        if is_packed:
            assert self.args.max_length is not None  # see SFTConfig.validate
            return pack_prepared(dataset, max_length=self.args.max_length, strategy=self.args.packing_strategy)
        return dataset

    def row_items(self, batch: TokenBatch) -> Tensor:
        """Trained tokens."""
        return row_items(batch.trainable, batch.row_index, batch.num_rows, reduction="token", constant=None)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossOutput:
        """Sum of the token losses."""
        predicted: list[WantName] = ["predicted"] if self.predicted is not None else []
        scores = self.scorer.scores(model, batch, want=("entropy", "correct", *predicted))
        weights = token_weights(batch.trainable, batch.row_index, batch.num_rows, reduction="token")
        total = (weights * SUPERVISED_LOSSES[self.args.loss_type](scores.logprobs)).sum()
        count = weights.sum()
        metrics: dict[str, Metric] = {
            "entropy": Mean((scores.entropy.detach() * weights).sum(), count),
            "mean_token_accuracy": Mean((scores.correct * weights).sum(), count),
        }
        return LossOutput(total=total, metrics=metrics, predictions=scores.wanted.get("predicted"))


def tokenized_texts(dataset: Any, processing_class: ProcessingClass, args: SFTConfig, *, is_packed: bool) -> Any:
    """Rows before they are packed, whole where packing cuts them; see `data.tokenize.prepare_sft_dataset`."""
    if args.skips_preparation and not has_columns(dataset, ("input_ids",)):
        raise DataError(
            'dataset_kwargs={"skip_prepare_dataset": True}: rows must be token ids, but the dataset has no column '
            f"'input_ids', only {get_dataset_column_names(dataset)}. Leave the option out, and text is tokenized."
        )
    is_cut_later = is_packed and args.packing_strategy != "bfd"
    return prepare_sft_dataset(
        dataset,
        processing_class,
        max_length=None if args.skips_preparation or is_cut_later else args.max_length,
        truncation=TRUNCATION_SIDES[args.truncation_mode],
        completion_only_loss=args.completion_only_loss,
        assistant_only_loss=args.assistant_only_loss,
        text_field=args.dataset_text_field,
        invalid_rows=args.invalid_rows,
        chat_template_kwargs=cast("dict[str, Any] | None", args.chat_template_kwargs),
        num_proc=args.dataset_num_proc,
    )
