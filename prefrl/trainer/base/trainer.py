"""The base of all trainers: the model, one normalized update for each optimizer step, metrics, checkpoints."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import torch

from prefrl import distributed
from prefrl.data.checks import ID_COLUMNS, check_known_ids, check_positions, warn_of_shared_rows
from prefrl.data.images import ProcessingClass, tokenizer_of, with_named_images
from prefrl.metrics import Metric, merge
from prefrl.models.adapters import is_peft_model
from prefrl.models.export import whole_state
from prefrl.models.flops import model_cost, num_weights
from prefrl.models.forward import prepare_for_scoring, verdict_of
from prefrl.models.kernels import OffloadActivations
from prefrl.models.load import load_model, load_processing_class, num_embeddings
from prefrl.models.plans import position_limit
from prefrl.options.size import automatic_rate
from prefrl.run.folder import check_writable
from prefrl.trainer.account import StepAccount, idle_share
from prefrl.trainer.base.arguments import check_dataset, check_names
from prefrl.trainer.base.facts import facts_of
from prefrl.trainer.base.references import add_kernels, change_policy, kept_reference, reader_for
from prefrl.trainer.base.router_loss import router_coef_of, with_router_loss
from prefrl.trainer.base.scorer import Scorer
from prefrl.trainer.checkpointing import check_fingerprint, load_reference, save_fingerprint, save_reference
from prefrl.trainer.decisive import data_fingerprint, decisive_options, model_fingerprint
from prefrl.trainer.evaluation import check_metric_names, check_training_set, drained, first_rows
from prefrl.trainer.features import MovingReference, count_flops
from prefrl.trainer.loop import Loop
from prefrl.trainer.memory import TRAINING, explained, size_of
from prefrl.trainer.optimizers import averages_weights, use_averaged_weights, use_trained_weights
from prefrl.trainer.progress.history import History
from prefrl.trainer.progress.views import add_views, closed_at_end
from prefrl.trainer.steps import Step, SyncStep
from prefrl.types import IdleBatch, LossOutput, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from prefrl.losses.per_token import TokenScores
    from prefrl.models.forward import WantName
    from prefrl.models.reference import Reference
    from prefrl.options.reference import ReferenceOptions
    from prefrl.trainer.base.config import BaseConfig
    from prefrl.trainer.evaluation import ComputeMetrics, PredictedRows
    from prefrl.trainer.steps import LongBatch

__all__ = ["BaseTrainer"]

Optimizers = tuple["torch.optim.Optimizer | None", "torch.optim.lr_scheduler.LRScheduler | None"]
Ready = TypeVar("Ready", bound=TokenBatch)  # the stage of the batches that a trainer's loss reads


class BaseTrainer(Loop, Generic[Ready]):
    """HuggingFace's loop around flat token batches.

    A leaf implements `loss`, which returns a sum; `micro_batches_of_step` counts what the sum is over. This class
    divides by the count of the whole optimizer step over all ranks, so micro-batch size, gradient accumulation, world
    size and layout change the update by rounding only.

    HuggingFace passes `training_step` one item for each gradient accumulation step. The last of them is the whole
    `Step`, with any number of micro-batches; the items before it are empty.
    """

    # HuggingFace must not divide the loss by the accumulation steps: it is divided here, by the step's item count.
    loss_is_scaled_for_ga = True
    _splits_rows = False  # whether processes can share the tokens of a row
    _id_columns: tuple[str, ...] = ID_COLUMNS  # columns of token ids in prepared datasets
    _derived_columns: tuple[str, ...] = ()  # columns of prepared datasets that models have computed

    args: BaseConfig
    predicted: PredictedRows | None = None  # of the running evaluation, if anybody asks for them
    _reference_moves = False
    _averages_weights = False  # whether the optimizer has two sets of weights

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        """Refuse unknown names of arguments before a constructor does, which would not say what is meant.

        Raises:
            ConfigError: There is one.
        """
        check_names(cls, arguments)
        return object.__new__(cls)

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        args: BaseConfig,
        *,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None = None,
        processing_class: ProcessingClass | None = None,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        peft_config: PeftConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
    ) -> None:
        check_writable(Path(args.output_dir))
        args.check_packages_installed()
        distributed.check_devices(args.n_gpu)
        distributed.tell_deepspeed()
        name = type(self).__name__
        self._parallelism = distributed.set_up_parallelism(
            args.parallelism_config, trainer=name, splits_rows=self._splits_rows, longest_wait=args.ddp_timeout
        )
        model = self.load_policy(
            model,
            model_init_kwargs=cast("dict[str, Any] | None", args.model_init_kwargs),
            peft_config=peft_config,
            freeze=args.freeze or (),
            seed=args.seed,
            quantization_config=quantization_config,
        )
        distributed.check_model(model, trainer=name)
        self.args = args
        processing_class = self._loaded_processing_class(model, processing_class)
        self._router_coef = router_coef_of(model, args)
        change_policy(args, model)
        prepare_for_scoring(model)
        self.metrics = {"train": {}, "eval": {}}
        self.account = StepAccount(args.device)
        self._fit_options(args, model)
        super().__init__(
            model=model,
            args=args,
            data_collator=self.collate,
            train_dataset=self.prepared(train_dataset, processing_class, training=True),
            eval_dataset=self.prepared(eval_dataset, processing_class, training=False),
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_training_set(args, self.train_dataset, self.eval_dataset)
        warn_of_shared_rows(self.train_dataset, self.eval_dataset, columns=self._id_columns)
        self.scorer = Scorer(args, self.accelerator, self.account, lambda: self.policy)
        self._check_backend(model)
        self.model.add_model_tags(["prefrl", self.algorithm])
        self._add_views()
        if args.log_flops:
            count_flops(self)

    def _fit_options(self, args: BaseConfig, model: nn.Module) -> None:
        """Set what the options leave to the model."""
        self._num_embeddings, self._position_limit = num_embeddings(model), position_limit(model)
        args.fit_context(self._position_limit)
        if "learning_rate" in args.automatic:
            args.learning_rate = automatic_rate(args, has_adapter=is_peft_model(model))

    def _add_views(self) -> None:
        self.history = History(self._facts, lambda: self.account.current)
        add_views(self.callback_handler, self.history, run=lambda: self.run_folder.run)

    def _facts(self) -> Mapping[str, str]:
        of_run = self.policy, self.ref_model, self.state, self.train_dataset
        return facts_of(self.args, *of_run, algorithm=self.algorithm)

    def _loaded_processing_class(self, model: PreTrainedModel, given: ProcessingClass | None) -> ProcessingClass:
        kwargs = cast("dict[str, Any] | None", self.args.model_init_kwargs)
        loaded = load_processing_class(model, given, model_init_kwargs=kwargs, changes=self.args.tokenizer_changes)
        self.images = reader_for(model, loaded)
        return loaded

    def _check_backend(self, model: nn.Module) -> None:
        distributed.check_backend(self.args, os.environ, self.accelerator)
        distributed.check_deepspeed(self.accelerator, trainer=type(self).__name__)
        distributed.check_quantized(self.accelerator, model)
        if self.args.has_own_schedule or self.args.increase_batch_size_on_plateau:
            distributed.check_chooses_schedule(self.accelerator)
        changed = "torch_compile=True" if self.args.torch_compile else "fp8=True" if self.args.fp8 else None
        distributed.check_changed_layers(self.accelerator, option=changed)
        distributed.keep_outputs_exact(self.accelerator)

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        """HuggingFace's hook, called before it creates its accelerator."""
        return distributed.accelerator_arguments(super()._build_accelerator_args(**arguments), self._parallelism)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, also if `processing_class` is a processor."""
        return tokenizer_of(self.processing_class)

    @property
    def reference(self) -> Reference | None:
        """The reference that the policy stays close to, if one is kept."""
        return self.scorer.reference

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """TRL's name for the reference; None if it is the policy without its adapter, or if there is none."""
        return None if self.reference is None else self.reference.own_model

    # What a subclass implements.

    @abstractmethod
    def loss(self, model: nn.Module, batch: Ready) -> LossOutput:
        """The SUM of the loss over a micro-batch, and metrics. Runs the model through `self.score`."""

    @abstractmethod
    def row_items(self, batch: Any) -> Tensor:
        """[B] what each row counts among the items: `loss` sums over them, sum / (items of the step) is the loss."""

    @abstractmethod
    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Check and tokenize a dataset."""

    @abstractmethod
    def trial(self, num_rows: int) -> AbstractContextManager[LongBatch]:
        """A context with a micro-batch of rows that are as long as any.

        At its end, everything that the next update depends on is as it was before. All ranks must enter it.
        """

    @abstractmethod
    def evaluation_step(self, model: nn.Module, item: Any) -> dict[str, Metric]:
        """Metrics of one item of the evaluation loader."""

    def end_evaluation(self, model: nn.Module, name: str) -> dict[str, Metric]:
        """Metrics of all items together, after the last one; see `Evaluated`."""
        return {}

    @abstractmethod
    def rows_of(self, item: Any) -> int:
        """Dataset rows in an item of the evaluation loader."""

    @abstractmethod
    def collate(self, rows: list[dict[str, Any]]) -> Any:
        """Turn dataset rows into one item of the data loader; `rows` may be empty."""

    @abstractmethod
    def micro_batches_of_step(self, items: list[Any]) -> tuple[list[Ready], float]:
        """The micro-batches of one optimizer step on this rank and their item count, made from the loader's items."""

    def load_policy(self, model: str | Path | PreTrainedModel | nn.Module, **options: Any) -> PreTrainedModel:
        """The model to train; see `models.load.load_model`."""
        return load_model(model, **options)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """HuggingFace's hook. It has just applied Liger again, to the whole process: our choice must come last."""
        add_kernels(self.args, self.policy)
        with closed_at_end(self.callback_handler):
            return super()._inner_training_loop(*args, **kwargs)

    def _add_reference(self, options: ReferenceOptions, given: PreTrainedModel | None = None) -> None:
        """Create the reference that the options ask for, and move it during training if they say so."""
        reference = kept_reference(self.args, options, self.model, given, accelerator=self.accelerator)
        self.scorer.reference = reference
        if reference is None:
            return
        if self.account.flops is not None:
            cost = model_cost(self.model, with_adapter=False) if given is None else model_cost(given)
            self.account.flops.reference = cost
            self.scorer.reference_logprobs(self._idle_batch())  # runs the self-check now, as for the policy
        if options.sync_ref_model:
            alpha, steps = options.ref_model_mixup_alpha, options.ref_model_sync_steps
            self.parts.add(MovingReference(reference, alpha=alpha, steps=steps))
            self._reference_moves = True

    def _begin_training(self) -> None:
        """Called on all ranks before the first step of a training run."""
        check_metric_names(self.args, self.eval_dataset)
        self._averages_weights = averages_weights(self.optimizer)
        if distributed.num_processes() > 1:  # the self-check makes several passes; FSDP2 must run them outside a step
            verdict_of(self.policy)
            distributed.release(self.policy)

    def _end_training(self) -> None:
        """Called on all ranks after the last step of a training run."""
        use_averaged_weights(self.optimizer)

    # One optimizer step.

    def score(self, model: nn.Module, batch: TokenBatch, want: Sequence[WantName]) -> TokenScores:
        """[N] scores of the response tokens; see `Scorer.scores`."""
        return self.scorer.scores(model, batch, want)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Step], float]:
        """HuggingFace's hook, called once for each optimizer step: the step's items and its count over all ranks."""
        self._start_step()
        items = self.plan.next_items(epoch_iterator, num_batches)
        if not items:
            return [], 0.0
        micro_batches, count = self.micro_batches_of_step(items)
        seen = self._tokens_seen(micro_batches)
        run = sum(batch.num_forward_tokens for batch in micro_batches)
        total_count, num_tokens, num_run = distributed.sum_over_ranks([count, seen, run], device)
        # HuggingFace's state is saved in checkpoints, so the count continues after a resume.
        self.state.num_input_tokens_seen += int(num_tokens)
        # ZeRO and FSDP gather weights in every forward pass, so all ranks must run the same number of passes.
        num_forwards, most_run = distributed.max_over_ranks([max(len(micro_batches), 1), run], device)
        merge(self.metrics["train"], idle_share(num_run, most_run, distributed.world_size()))
        passes: list[TokenBatch] = [*micro_batches]
        if num_missing := int(num_forwards) - len(passes):
            passes += [self._idle_batch()] * num_missing
        return [*(SyncStep() for _ in items[1:num_batches]), SyncStep(passes)], total_count

    def _start_step(self) -> None:
        self.parts.tell("before_step", self)
        self.account.start()
        if self._averages_weights:
            use_trained_weights(self.optimizer)

    def _tokens_seen(self, batches: Sequence[TokenBatch]) -> int:
        """Tokens that a step adds to `num_tokens`: those of all rows, each including its own prompts."""
        return sum(batch.forward_tokens([row]) for batch in batches for row in range(batch.num_rows))

    def _idle_batch(self) -> IdleBatch:
        """One token without a loss; its forward and backward pass gives every parameter a zero gradient."""
        return IdleBatch.of_token(self.tokenizer.pad_token_id)

    def training_step(
        self, model: nn.Module, inputs: Step, num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        """Forward and backward pass of all micro-batches of the step; the last one synchronizes gradients."""
        loss = inputs.run(model, self.micro_step, num_items_in_batch)
        loss = loss.to(self.args.device, non_blocking=True)  # without micro-batches, it is on the host
        self.current_step, self.step_loss = inputs, loss
        if inputs.micro_batches:
            self.account.switch("optimizer")
        return loss

    def micro_step(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """Forward and backward pass of one micro-batch; the last one of a step synchronizes gradients over ranks."""
        distributed.announce_backward(self.accelerator, is_last=is_last)
        # HuggingFace's training_step runs compute_loss, which is timed as the forward phase, and the backward pass.
        with (
            explained(lambda: f"the training pass of a micro-batch with {size_of(batch)}", self.args, TRAINING),
            self.account.passes("training", [batch]),
            self.account.phase("backward"),
            nullcontext() if is_last else distributed.no_sync(model),
        ):
            loss: Tensor = super().training_step(model, batch, num_items)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Ready | IdleBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """This micro-batch's share of the step's loss.

        Raises:
            ValueError: `return_outputs` is set, or the step's count is missing.
        """
        if return_outputs or num_items_in_batch is None:
            raise ValueError(
                "compute_loss needs num_items_in_batch, and returns only the loss: return_outputs must be False"
            )
        with self.account.phase("forward"):
            if isinstance(inputs, IdleBatch):
                return self._forward_sum(model, inputs) * 0.0
            with self._saved_activations():
                output = self.full_loss(model, inputs)
        merge(self.metrics["train"], output.metrics)
        # A loss that is not finite shows in the gradients, too: DeepSpeed updates before anybody can look at the loss.
        total = output.total * (1.0 + 0.0 * output.total.detach())
        # Data-parallel backends average gradients over ranks, but items are counted over all of them.
        return total * (distributed.world_size() / max(float(num_items_in_batch), 1.0))

    def full_loss(self, model: nn.Module, batch: Ready) -> LossOutput:
        """`loss` and, for a mixture of experts, the balancing loss of its routers."""
        loss, coef = partial(self.loss, model, batch), self.router_coef
        return loss() if coef == 0 else with_router_loss(loss, self.scorer, batch, self.row_items(batch), coef=coef)

    @property
    def router_coef(self) -> float:
        """Weight of the routers' balancing loss in this step; 0: it is not computed."""
        return self._router_coef

    def _evaluated(self, model: nn.Module, batches: Sequence[Ready], *, num_missing: int) -> Iterator[LossOutput]:
        """The loss of each micro-batch of an evaluation; then passes that only other ranks have a loss for."""
        for batch in batches:
            with self.accelerator.autocast():  # accelerate wraps the model's forward only once training has started
                output = self.full_loss(model, batch.to(self.args.device))
            yield output
        for _ in range(num_missing):
            self._forward_sum(model, self._idle_batch().to(self.args.device))

    def _saved_activations(self) -> AbstractContextManager[None]:
        """Context of a forward pass that stores its activations on the host if `activation_offloading` is set."""
        return OffloadActivations(self.args.device.type) if self.args.activation_offloading else nullcontext()

    def _forward_sum(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Scalar that depends on every parameter of the forward pass, so that each gets a gradient."""
        return self.score(model, batch, want=()).logprobs.sum()

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device) if isinstance(inputs, TokenBatch) else super()._prepare_inputs(inputs)

    def cut(self, batch: Ready, rows_per_micro_batch: int) -> list[Ready]:
        """Cut a batch into micro-batches, by tokens if `max_tokens_per_micro_batch` is set, otherwise by rows."""
        if self.args.max_tokens_per_micro_batch is not None:
            return batch.split(self.args.max_tokens_per_micro_batch)
        return batch.chunks(rows_per_micro_batch)

    def floating_point_ops(self, inputs: Step) -> int:
        """6 * parameters outside embeddings * tokens: HuggingFace's estimate, for the tokens that are really run."""
        return self._flops_of_token * sum(batch.num_forward_tokens for batch in inputs.micro_batches)

    @cached_property
    def _flops_of_token(self) -> int:
        return 6 * num_weights(self.policy)

    # Datasets.

    def prepared(self, dataset: Any, processing_class: ProcessingClass, *, training: bool) -> Any:
        """A raw dataset, or several by name, checked and tokenized; None stays None."""
        if dataset is None:
            return None
        check_dataset("train_dataset" if training else "eval_dataset", dataset, takes_several=not training)
        if isinstance(dataset, Mapping):
            return {name: self.prepared(part, processing_class, training=training) for name, part in dataset.items()}
        dataset = dataset if training else first_rows(dataset, self.args.max_eval_samples)
        dataset = with_named_images(dataset, self.args.image_key)
        prepared = self.prepare_dataset(dataset, processing_class, training=training)
        columns, tokenizer = self._id_columns, tokenizer_of(processing_class)
        prepared = check_known_ids(prepared, tokenizer, num_embeddings=self._num_embeddings, columns=columns)
        return check_positions(prepared, self._position_limit, self.args.length_bound, columns=columns)

    # Metrics.

    @property
    def phases(self) -> list[str]:
        """All phases that a step of this trainer may have: the names in `time/<phase>_s`."""
        return ["forward", "backward", "optimizer", *(["reference"] if self.reference is not None else [])]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """HuggingFace's hook: adds the metrics since the last log, under TRL's names; at the end, too."""
        is_rest = "train_runtime" in logs and self._globalstep_last_logged < self.state.global_step
        if "loss" in logs or is_rest:
            merge(self.metrics["train"], self.account.drain(self.phases))
            logs |= drained(self.metrics, "train") | {"num_tokens": float(self.state.num_input_tokens_seen)}
        super().log(logs, start_time)

    # Checkpoints.

    def decisive(self) -> dict[str, Any]:
        """See `Loop`."""
        is_sought = self.args.sought == {"per_device_train_batch_size"}  # `found_sizes` says how many rows were found
        return {
            "algorithm": self.algorithm,
            "model": model_fingerprint(self.policy),
            "data": data_fingerprint(self.train_dataset, without=self._derived_columns),
            "rows_per_step": "auto" if is_sought else self.get_total_train_batch_size(self.args),
            **decisive_options(self.args),
        }

    def _save_update_state(self, folder: Path) -> None:
        """See `Loop`; also writes the reference if it moves, or the fingerprint of its weights."""
        super()._save_update_state(folder)
        if (fingerprint := self._reference_fingerprint()) is not None and self.args.should_save:
            save_fingerprint(fingerprint, folder)
        if self._reference_moves and self.reference is not None:
            save_reference(self.reference, folder, writes=self.args.should_save)

    def _load_update_state(self, folder: Path) -> None:
        """Read what `_save_update_state` wrote. All ranks must call it.

        Raises:
            ConfigError: The checkpoint was trained with a reference of other weights.
        """
        super()._load_update_state(folder)
        if (fingerprint := self._reference_fingerprint()) is not None:
            check_fingerprint(fingerprint, folder)
        if self._reference_moves and self.reference is not None:
            load_reference(self.reference, folder)

    def _reference_fingerprint(self) -> str | None:
        """Fingerprint of the weights of a reference that does not move; None if there is none. All ranks call it."""
        return None if self.reference is None or self._reference_moves else self.reference.fingerprint()

    def write_model(self, folder: Path) -> None:
        """See `Loop`."""
        state = whole_state(self.policy, keep=self.args.should_save)
        if self.args.should_save:
            self._save(str(folder), state)
