"""The base of all trainers on a fixed dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, cast

import datasets
import torch
from transformers import GenerationConfig

from prefrl import distributed
from prefrl.data.checks import warn_of_unknown_end
from prefrl.data.collate import preference_batch
from prefrl.data.samplers import Dealing, EpochDataLoader, StepBatchSampler, StreamLoader, dealing_of
from prefrl.errors import ConfigError
from prefrl.generation.local.generator import end_token_ids
from prefrl.metrics import Mean, Metric
from prefrl.models.adapters import is_peft_model
from prefrl.models.fingerprint import weights_fingerprint
from prefrl.models.modes import eval_mode
from prefrl.options.fields import warn_of_hint
from prefrl.options.names import ARGUMENTS
from prefrl.options.offline import OfflineReferenceOptions, SampleOptions
from prefrl.trainer.arguments import (
    check_arguments,
    check_has_data,
    check_stream,
    kept_reference,
    loaded_reference,
    named,
    own_config,
)
from prefrl.trainer.base_trainer import BaseTrainer, Optimizers, Ready
from prefrl.trainer.callbacks import LogCompletionsCallback
from prefrl.trainer.features import EvaluationSize
from prefrl.trainer.offline.loss_balance import LossBalance
from prefrl.trainer.offline.precompute import REFERENCE_COLUMNS, precompute_reference
from prefrl.trainer.offline.preference import half_pairs, prepare_pairs
from prefrl.trainer.offline.rows import RunningMean, longest_rows, predicted_pairs
from prefrl.trainer.steps import LongBatch
from prefrl.types import LabeledBatch, ReferencedBatch, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback

    from prefrl.data.images import ProcessingClass
    from prefrl.losses.per_token import TokenScores
    from prefrl.models.reference import Reference
    from prefrl.models.teachers import Teachers
    from prefrl.trainer.configs import OfflineConfig
    from prefrl.trainer.evaluation import ComputeMetrics

_REWARD_MEAN_FILE = "reward_mean.json"
_LOSS_BALANCE_FILE = "loss_balance.json"


class TrainerArguments(TypedDict, total=False):
    """The keyword arguments that the constructors of all offline trainers take."""

    train_dataset: Dataset | IterableDataset | None
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None  # one, or several by name
    processing_class: ProcessingClass | None  # the tokenizer or processor; None: the model's
    compute_metrics: ComputeMetrics | None  # further metrics of evaluations; see docs/concepts.md
    callbacks: list[TrainerCallback] | None
    optimizers: Optimizers  # optimizer and scheduler instead of those that `args` describes
    peft_config: PeftConfig | None  # train an adapter of this kind instead of the model
    quantization_config: BitsAndBytesConfig | None  # load the model, given by name, quantized; needs an adapter


# The stage of the batches that the data loader gives.
Loaded = TypeVar("Loaded", bound=TokenBatch)


class OfflineTrainer(BaseTrainer[Ready], Generic[Loaded, Ready]):
    """Trains on the rows of a fixed dataset, with one normalized update for each optimizer step.

    A leaf implements `loss` and, if the loss reads more than what was loaded, `prepare_step`, which makes its batches.
    If its rows are not pairs, it has `prepare_dataset`, `lay_out` and `row_items` of its own. If its loss needs a
    reference, it calls `set_up_reference` in its constructor.

    Args:
        model: Name, path or instance. An instance is trained in place.
        args: Options. The default options write to `<model name>-<algorithm>`. `TrainingArguments` are converted, see
            `own_config`.
        data: Further positional arguments, in TRL's order. Those that have no counterpart here must be None.
        arguments: See `TrainerArguments`.

    Raises:
        ConfigError: The options cannot be combined.
        DataError: A dataset cannot be used; the message names the row and the column.
    """

    _derived_columns = tuple(REFERENCE_COLUMNS.values())
    # For `compute_metrics`: the predictions and labels of a batch's rows, from `LossOutput.predictions`.
    predictions_of: Callable[[Any, Tensor], tuple[Sequence[Any], Sequence[Any]]] = staticmethod(predicted_pairs)
    args: OfflineConfig
    lay_out: Callable[..., Any] = staticmethod(preference_batch)  # the flat batch of some rows of a prepared dataset
    row_items = staticmethod(half_pairs)  # see `BaseTrainer`
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: OfflineConfig | None = None,
        *data: Any,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        given = named(type(self), data, arguments)
        check_arguments(type(self), {"model": model, "args": args, **given})
        check_has_data(given)
        given = {name: value for name, value in given.items() if name not in ARGUMENTS}
        suffix = type(self).__name__.removesuffix("Trainer")
        self.args = args = own_config(type(self), args, model, suffix)
        check_stream(given.get("train_dataset"), args)
        super().__init__(model, args, **given)
        if self.policy.can_generate():
            end_ids = end_token_ids(self.policy, self.tokenizer)
            warn_of_unknown_end(self.train_dataset, self.tokenizer, end_ids=end_ids)
        if isinstance(args, SampleOptions) and args.generate_during_eval:
            sampling = GenerationConfig(do_sample=True)
            self.add_callback(LogCompletionsCallback(self, sampling, num_prompts=args.per_device_eval_batch_size))
        self.reward_mean: RunningMean | None = None  # for losses that compare rewards with their running mean
        self.loss_balance: LossBalance[Ready] | None = None  # for several losses
        self._evaluation_size: EvaluationSize | None = None
        if "per_device_eval_batch_size" in args.automatic:
            self._evaluation_size = EvaluationSize(args, self._evaluate_longest, self._bytes_to_come)

    # The reference policy.

    # With precompute_ref_log_probs:
    _precomputed_from: str | None = None  # fingerprint of the reference's weights
    _late_reference: Reference | Teachers | None = (
        None  # for datasets given to evaluate(), where keeping it is for free
    )
    _policy_is_reference = False  # it has the weights that the datasets were scored with

    def set_up_reference(self, given: str | Path | PreTrainedModel | None) -> None:
        """Create the reference that the options ask for, or score the datasets with it; for leaves that need one.

        Args:
            given: The reference model. None means the policy as it is now.
        """
        options = self.args
        assert isinstance(options, OfflineReferenceOptions)
        is_instance = given is not None and not isinstance(given, str | Path)
        given = loaded_reference(given, self.policy, self.args)
        if not options.precompute_ref_log_probs:
            self._add_reference(options, given)
            return
        # Before training, the policy is its own reference: no copy is needed.
        self._policy_is_reference = given is None
        if given is not None:
            self._add_reference(options, given)
        weights = weights_fingerprint(self.policy) if self.reference is None else self.reference.fingerprint()
        self._precomputed_from = weights
        self.train_dataset = self._scored(self.train_dataset)
        if isinstance(self.eval_dataset, Mapping):
            self.eval_dataset = {name: self._scored(dataset) for name, dataset in self.eval_dataset.items()}
        else:
            self.eval_dataset = self._scored(self.eval_dataset)
        if is_instance:
            self._late_reference = self.reference
        elif given is None and is_peft_model(self.policy):
            self._late_reference = kept_reference(self, options, self.policy, None, moves=False)
        self.scorer.reference = None

    def _begin_training(self) -> None:
        """See `BaseTrainer`."""
        super()._begin_training()
        self._policy_is_reference = False

    def prepared(self, dataset: Any, processing_class: ProcessingClass, *, training: bool) -> Any:
        """See `BaseTrainer`; a dataset given to `evaluate` is also scored with the reference, if that is needed.

        Raises:
            ConfigError: The reference is gone.
        """
        prepared = super().prepared(dataset, processing_class, training=training)
        if self._precomputed_from is None or isinstance(prepared, Mapping):
            return prepared
        if self._late_reference is None and not self._policy_is_reference:
            raise ConfigError(
                "precompute_ref_log_probs=True: the reference model was not kept, so a dataset passed to evaluate() "
                "cannot be scored. Pass it to the constructor as eval_dataset, pass ref_model as an instance, or set "
                "precompute_ref_log_probs=False."
            )
        self.scorer.reference = self._late_reference
        try:
            return self._scored(prepared)
        finally:
            self.scorer.reference = None

    def _scored(self, dataset: Any) -> Any:
        """A prepared dataset with the log-probs of the reference that the scorer has, or else of the policy."""
        if dataset is None:
            return None
        options = self.args
        assert isinstance(options, OfflineReferenceOptions)
        score = self.scorer.of_policy if self.reference is None else self.scorer.of_reference
        return precompute_reference(
            dataset,
            reference_logprobs=lambda batch: score(batch).logprobs,
            collate=cast("Callable[..., TokenBatch]", self.collate),
            batch_size=options.precompute_ref_batch_size or self.args.per_device_train_batch_size,
            weights=cast("str", self._precomputed_from),
            dtype=self._scoring_dtype(),
            temperature=self.args.scoring_temperature,
        )

    def _scoring_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.policy.dtype

    def prepare_step(self, batches: list[Loaded]) -> list[Ready]:
        """The micro-batches of a step with what their losses read besides the policy; here, that is nothing.

        Called once for each step on every rank, before the first forward pass, even if there are no batches.
        """
        return cast("list[Ready]", batches)

    def with_reference(self, batches: list[LabeledBatch]) -> list[ReferencedBatch]:
        """The micro-batches of a step with the reference's log-probs. All ranks must call it."""
        if self.reference is None:
            return cast("list[ReferencedBatch]", batches)  # they were precomputed
        # Move the batches to the device now, so that the scores can stay there.
        batches = [batch.to(self.args.device) for batch in batches]
        parts = self.logprobs_of_step(self.scorer.of_reference, batches)
        return [ReferencedBatch.of(batch, ref_logprobs=part) for batch, part in zip(batches, parts, strict=True)]

    def logprobs_of_step(self, score: Callable[..., TokenScores], batches: Sequence[TokenBatch]) -> list[Tensor]:
        """[N] log-probs of each micro-batch of a step by `Scorer.of_reference` or `Scorer.of_policy`.

        All ranks must call it, even those without micro-batches.
        """
        rows = type(batches[0]).concat(batches) if batches else self._idle_batch().select([])
        largest = max((batch.num_forward_tokens for batch in batches), default=1)
        logprobs = score(rows, max_tokens=self.scorer.budget(largest)).logprobs
        return list(torch.split(logprobs, [batch.num_tokens for batch in batches]))

    # Datasets.

    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Check and tokenize a dataset of pairs."""
        return prepare_pairs(dataset, processing_class, self.args)

    def collate(self, rows: list[dict[str, Any]]) -> Loaded | None:
        """The flat batch of some rows, with their images; None if there are none."""
        rows = rows if self.images is None else [self.images.attach(row) for row in rows]
        return self.lay_out(rows) if rows else None

    def training_loader(self) -> EpochDataLoader | StreamLoader:
        """Micro-batches of this rank; see `StepBatchSampler`."""
        dataset = self.train_dataset
        # With a token budget, micro-batches have no fixed number of rows.
        dealing = self._dealing(dataset, equal_counts=self.args.max_tokens_per_micro_batch is None)
        if isinstance(dataset, datasets.IterableDataset):
            return self._stream_loader(
                dataset,
                micro_batch_size=self.args.per_device_train_batch_size,
                micro_batches_per_step=self.args.gradient_accumulation_steps,
                dealing=dealing,
                drop_last=self.args.dataloader_drop_last,
                repeat=True,
            )
        sampler = StepBatchSampler(
            len(dataset),
            micro_batch_size=self.args.per_device_train_batch_size,
            micro_batches_per_step=self.args.gradient_accumulation_steps,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            dealing=dealing,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
        )
        if len(sampler) == 0:
            raise ConfigError(
                f"the dataset has {len(dataset)} rows, fewer than one step of {sampler.rows_per_step}, and "
                "dataloader_drop_last=True leaves out incomplete steps"
            )
        return self._loader(dataset, sampler)

    def evaluation_loader(self, dataset: Any) -> EpochDataLoader | StreamLoader:
        """All rows of an evaluation dataset, distributed over the ranks."""
        if self._evaluation_size is not None:
            self._evaluation_size.settle(dataset)
        dealing = self._dealing(dataset, equal_counts=True)
        if isinstance(dataset, datasets.IterableDataset):
            size = self.args.per_device_eval_batch_size
            return self._stream_loader(dataset, micro_batch_size=size, dealing=dealing)
        sampler = StepBatchSampler(
            len(dataset),
            micro_batch_size=self.args.per_device_eval_batch_size,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            dealing=dealing,
        )
        return self._loader(dataset, sampler)

    def _evaluate_longest(self, dataset: Any, num_rows: int) -> int:
        """Evaluate rows of a dataset that are as long as any; returns the tokens of the pass."""
        item, model = self._longest(dataset, num_rows, option="eval_dataset"), self.policy.to(self.args.device)
        with eval_mode(model), torch.no_grad(), distributed.usable(model):
            self.evaluation_step(model, item)
        return int(item.num_forward_tokens)

    def _bytes_to_come(self) -> int:
        """Bytes of the trained weights if the optimizer has no moments of them yet, otherwise 0."""
        if self.optimizer is not None and self.optimizer.state:
            return 0
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def _longest(self, dataset: Any, num_rows: int, *, option: str) -> Loaded:
        hidden_size = self.policy.config.get_text_config().hidden_size
        loaded = self.collate(longest_rows(dataset, num_rows, hidden_size=hidden_size, option=option))
        assert loaded is not None
        return loaded

    def _dealing(self, dataset: Any, *, equal_counts: bool) -> Dealing | None:
        if distributed.world_size() == 1:
            return None
        hidden_size = self.policy.config.get_text_config().hidden_size
        return dealing_of(dataset, hidden_size=hidden_size, equal_counts=equal_counts)

    def _loader(self, dataset: Any, sampler: StepBatchSampler) -> EpochDataLoader:
        return EpochDataLoader(
            dataset,
            sampler,
            collate_fn=self.collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=False,  # batches are moved by _prepare_inputs
            persistent_workers=self.args.dataloader_num_workers > 0 and self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            # They lay out rows with this trainer, which cannot be sent to a process. A fork has it, and uses no GPU.
            multiprocessing_context="fork" if self.args.dataloader_num_workers else None,
        )

    def _stream_loader(
        self,
        dataset: IterableDataset,
        *,
        micro_batch_size: int,
        micro_batches_per_step: int = 1,
        dealing: Dealing | None,
        drop_last: bool = False,
        repeat: bool = False,
    ) -> StreamLoader:
        if self.args.dataloader_num_workers:
            warn_of_hint(
                self.args,
                f"dataloader_num_workers={self.args.dataloader_num_workers} has no effect because an IterableDataset "
                "is read by the training process itself. Set 0.",
            )
        return StreamLoader(
            dataset,
            micro_batch_size=micro_batch_size,
            micro_batches_per_step=micro_batches_per_step,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            dealing=dealing,
            drop_last=drop_last,
            repeat=repeat,
            collate_fn=self.collate,
        )

    # One step.

    @contextmanager
    def trial(self, num_rows: int) -> Iterator[LongBatch]:
        """See `BaseTrainer`."""
        loaded = self._longest(self.train_dataset, num_rows, option="train_dataset")
        (batch,) = self.prepare_step([loaded])
        try:
            yield LongBatch(batch, loaded.num_forward_tokens)
        finally:
            if self.reward_mean is not None:
                self.reward_mean.forget()

    def micro_batches_of_step(self, items: list[Loaded | None]) -> tuple[list[Ready], float]:
        """The loader's micro-batches; with a token budget, they are joined and cut again by tokens."""
        batches = numbered_apart([batch for batch in items if batch is not None])
        count = sum(float(self.row_items(batch).sum()) for batch in batches)
        if batches and self.args.max_tokens_per_micro_batch is not None:
            whole = type(batches[0]).concat(batches)
            batches = whole.split(self.args.max_tokens_per_micro_batch, whole_groups=True)
        if self.reward_mean is not None:
            self.reward_mean.fold()
        ready = self.prepare_step(batches)
        if self.loss_balance is not None:
            self.loss_balance.weigh(ready, self.logprobs_of_step(self.scorer.of_policy, ready))
        return ready, count

    def evaluation_step(self, model: nn.Module, item: Loaded | None) -> dict[str, Metric]:
        """The loss and its metrics on one micro-batch."""
        count = 0.0 if item is None else float(self.row_items(item).sum())
        if self.reward_mean is not None:
            self.reward_mean.fold()
        batches = self.prepare_step([] if item is None else [item])
        metrics: dict[str, Metric] = {}
        # Other ranks may need one without rows to take part in a forward pass.
        for output in self._evaluated(model, batches, num_missing=int(not batches)):
            metrics = {"loss": Mean(output.total, count), **output.metrics}
            if self.predicted is not None and output.predictions is not None:
                self.predicted.add(*self.predictions_of(batches[0], output.predictions))
        return metrics

    def rows_of(self, item: Loaded | None) -> int:
        """Rows in a micro-batch."""
        return 0 if item is None else len(set(item.group_index))

    # Checkpoints.

    def _save_update_state(self, folder: Path) -> None:
        """See `BaseTrainer._save_update_state`; also writes the reward mean and the balance of losses."""
        super()._save_update_state(folder)
        if self.reward_mean is not None:
            self.reward_mean.save(folder / _REWARD_MEAN_FILE, writes=self.args.should_save)
        if self.loss_balance is not None:
            self.loss_balance.save(folder / _LOSS_BALANCE_FILE, writes=self.args.should_save)

    def _load_update_state(self, folder: Path) -> None:
        """See `BaseTrainer._load_update_state`."""
        super()._load_update_state(folder)
        if self.reward_mean is not None:
            self.reward_mean.load(folder / _REWARD_MEAN_FILE)
        if self.loss_balance is not None:
            self.loss_balance.load(folder / _LOSS_BALANCE_FILE)

    def _fingerprints(self) -> dict[str, str]:
        """See `BaseTrainer`; log-probs that were precomputed stand for a reference, too."""
        precomputed = {} if self._precomputed_from is None else {"weights": self._precomputed_from}
        return precomputed | super()._fingerprints()


def numbered_apart(batches: list[Loaded]) -> list[Loaded]:
    """The batches with groups renumbered 0, 1, ... through all batches, so that no two batches share a number."""
    numbered = []
    first = 0
    for batch in batches:
        numbers = {group: first + i for i, group in enumerate(dict.fromkeys(batch.group_index))}
        numbered.append(batch.replace(group_index=tuple(numbers[group] for group in batch.group_index)))
        first += len(numbers)
    return numbered
