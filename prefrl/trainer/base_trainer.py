"""The base of all trainers: the model, one normalized update for each optimizer step, metrics, checkpoints."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
from prefrl.models.forward import verdict_of
from prefrl.models.load import load_model, load_processing_class, num_embeddings
from prefrl.models.modes import disable_dropout
from prefrl.models.plans import position_limit
from prefrl.models.scoring import prepare_for_scoring
from prefrl.options.training import automatic_rate
from prefrl.run.folder import Identity, check_writable
from prefrl.trainer import checkpointing
from prefrl.trainer.arguments import check_dataset, check_names, kept_reference, reader_for
from prefrl.trainer.evaluation import check_training_set, first_rows
from prefrl.trainer.facts import data_fingerprint, decisive_options, facts_of, model_fingerprint
from prefrl.trainer.features import MovingReference, RouterLoss, count_flops, parts_of_models
from prefrl.trainer.loop import Loop
from prefrl.trainer.optimizers import averages_weights, group_parameters, use_averaged_weights
from prefrl.trainer.parts import Parts
from prefrl.trainer.progress.history import History, next_commands, show_ending
from prefrl.trainer.progress.views import add_views, are_shown, hide_bars_in_files
from prefrl.trainer.scorer import Scorer
from prefrl.trainer.steps import LongBatch, Step, StepAccount, SyncStep, idle_share
from prefrl.types import IdleBatch, LossOutput, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput

    from prefrl.models.reference import Reference
    from prefrl.models.teachers import Teachers
    from prefrl.options.preference import ReferenceOptions
    from prefrl.trainer.base_config import BaseConfig
    from prefrl.trainer.evaluation import ComputeMetrics, PredictedRows

Optimizers = tuple["torch.optim.Optimizer | None", "torch.optim.lr_scheduler.LRScheduler | None"]
Ready = TypeVar("Ready", bound=TokenBatch)  # the stage of the batches that a trainer's loss reads


class BaseTrainer(Loop, Generic[Ready]):
    """HuggingFace's loop around flat token batches.

    A leaf implements `loss`, which returns a sum; `micro_batches_of_step` counts what the sum is over: tokens, rows or
    pairs, called items. `compute_loss` divides by the items of the whole optimizer step over all ranks, so micro-batch
    size, gradient accumulation, world size and layout change the update by rounding only.

    HuggingFace asks for the data of a step (`get_batch_samples`, here `make_step`) and then runs it (`training_step`,
    here `run_step`), which comes back to `Loop.micro_step` for each micro-batch, and there to `full_loss`.

    Methods of ours stand for the hooks of HuggingFace that a trainer may have to change, see `Loop`.
    """

    # HuggingFace must not divide the loss by the accumulation steps: `compute_loss` divides by the step's item count.
    loss_is_scaled_for_ga = True
    _id_columns: tuple[str, ...] = ID_COLUMNS  # columns of token ids in prepared datasets
    _derived_columns: tuple[str, ...] = ()  # columns of prepared datasets that models have computed

    args: BaseConfig
    predicted: PredictedRows | None = None  # of the running evaluation, if anybody asks for them
    _reference_moves = False

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        """Refuse unknown names of arguments before a constructor does, which would not say what is meant.

        Raises:
            ConfigError: There is one.
        """
        check_names(cls, arguments)
        if "TQDM_DISABLE" not in os.environ:  # with which the command hides them
            hide_bars_in_files()
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
        check_training_set(args, train_dataset, eval_dataset)
        distributed.check_devices(args.n_gpu)
        distributed.tell_deepspeed()
        name = type(self).__name__
        self._parallelism = distributed.set_up_parallelism(
            args.parallelism_config, trainer=name, longest_wait=args.ddp_timeout
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
        self.parts = Parts(parts_of_models(args, model))
        self.parts.tell("made", self, model, "policy")
        if args.disable_dropout:  # that of its adapter, too
            disable_dropout(model)
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

    def show_ending(self, *, saved: bool, **given: Any) -> None:
        """Show on the main process how training went and how to go on.

        Without views, in a search of hyperparameters, and before saving if a command shows it later, nothing is shown.

        Args:
            saved: Whether the model is in `output_dir`.
            given: What the commands to go on with can name; see `next_commands`.
        """
        is_now = saved or (self.history.shows_ending and not self.state.is_hyper_param_search)
        if is_now and self.is_world_process_zero() and are_shown(self.callback_handler):
            commands = partial(next_commands, is_chat=self.processing_class.chat_template is not None, **given)
            show_ending(self.algorithm, self.state, Path(self.args.output_dir), commands, saved=saved)

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

    @property
    def policy(self) -> PreTrainedModel:
        """The model that is trained, without the backend's wrapper."""
        return cast("PreTrainedModel", distributed.unwrap(self.model))

    @property
    def policy_learns(self) -> bool:
        """Whether this step changes the policy."""
        return True

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, also if `processing_class` is a processor."""
        return tokenizer_of(self.processing_class)

    @property
    def reference(self) -> Reference | Teachers | None:
        """The reference that the policy stays close to, if one is kept."""
        return self.scorer.reference

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """TRL's name for the reference; None if it is the policy without its adapter, or if there is none."""
        return None if self.reference is None else self.reference.own_model

    @property
    def aux_loss_enabled(self) -> bool:
        """TRL's name for whether the loss has the balancing loss of a mixture of experts."""
        return self.parts.get(RouterLoss) is not None

    # What a subclass implements.

    @abstractmethod
    def loss(self, model: nn.Module, batch: Ready) -> LossOutput:
        """The SUM of the loss over a micro-batch, and metrics. Runs the model through `self.scorer.scores`."""

    @abstractmethod
    def row_items(self, batch: Any) -> Tensor:
        """[B] what each row counts among the items: `loss` sums over them, sum / (items of the step) is the loss."""

    @abstractmethod
    def prepare_dataset(self, dataset: Dataset, processing_class: ProcessingClass, *, training: bool) -> Dataset:
        """Check and tokenize a dataset."""

    @abstractmethod
    def trial(self, num_rows: int) -> AbstractContextManager[LongBatch]:
        """A context with a micro-batch of rows as long as the longest.

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

    @abstractmethod
    def training_loader(self) -> Any:
        """The training dataset in items of a micro-batch, on this process."""

    @abstractmethod
    def evaluation_loader(self, dataset: Any) -> Any:
        """A prepared dataset in items of the evaluation, on this process."""

    def load_policy(self, model: str | Path | PreTrainedModel | nn.Module, **options: Any) -> PreTrainedModel:
        """The model to train; see `models.load.load_model`."""
        return load_model(model, **options)

    def _add_reference(
        self, options: ReferenceOptions, given: PreTrainedModel | None = None, *, name: str = "ref_model"
    ) -> None:
        """Create the reference that the options ask for, or take the one `given` as the argument `name`."""
        movers = [callback for callback in checkpointing.stateful(self) if callback.moves_reference]
        moves = options.sync_ref_model or bool(movers)
        reference = kept_reference(self, options, self.model, given, moves=moves, name=name)
        self.scorer.reference = reference
        if reference is None:
            return
        if self.account.flops is not None:
            cost = model_cost(self.model, with_adapter=False) if given is None else model_cost(given)
            self.account.flops.others["reference"] = cost
            self.scorer.of_reference(self._idle_batch())  # runs the self-check now, as for the policy
        for callback in movers:
            callback.take_reference(reference, options)
        if moves:
            alpha, resets = options.ref_model_mixup_alpha, options.reset_optimizer_with_reference
            every = options.ref_model_sync_steps if options.sync_ref_model else None
            if resets:
                distributed.check_state_whole(self.accelerator, "reset_optimizer_with_reference=True")
            self.parts.add(MovingReference(reference, alpha=alpha, steps=every, resets_optimizer=resets))
            self._reference_moves = True

    def _begin_training(self) -> None:
        """Called on all ranks before the first step of a training run."""
        self.evaluation.check_metrics()
        self._averages_weights = averages_weights(self.optimizer)
        if distributed.num_processes() > 1:  # the self-check makes several passes; FSDP2 must run them outside a step
            verdict_of(self.policy)
            distributed.release(self.policy)

    def _end_training(self) -> None:
        """Called on all ranks after the last step of a training run."""
        use_averaged_weights(self.optimizer)

    # One optimizer step.

    def make_step(self, items: list[Any]) -> tuple[Step, float]:
        """The step that the data loader's items make, and its count over all ranks."""
        micro_batches, count = self.micro_batches_of_step(items)
        device = self.args.device
        seen = self._tokens_seen(micro_batches)
        run = sum(batch.num_forward_tokens for batch in micro_batches)
        total_count, num_tokens, num_run = distributed.sum_over_ranks([count, seen, run], device)
        # HuggingFace's state is saved in checkpoints, so the count continues after a resume.
        self.state.num_input_tokens_seen += int(num_tokens)
        # ZeRO and FSDP gather weights in every forward pass, so all ranks must run the same number of passes.
        num_forwards, most_run = distributed.max_over_ranks([max(len(micro_batches), 1), run], device)
        if (world_size := distributed.world_size()) > 1:
            merge(self.metrics["train"], idle_share(num_run, most_run, world_size))
        passes: list[TokenBatch] = [*micro_batches]
        if num_missing := int(num_forwards) - len(passes):
            passes += [self._idle_batch()] * num_missing
        return SyncStep(passes), total_count

    def _tokens_seen(self, batches: Sequence[TokenBatch]) -> int:
        """Tokens that a step adds to `num_tokens`: those of all rows, each including its own prompts."""
        return sum(batch.forward_tokens([row]) for batch in batches for row in range(batch.num_rows))

    def _idle_batch(self) -> IdleBatch:
        """One token without a loss; its forward and backward pass gives every parameter a zero gradient."""
        return IdleBatch.of_token(self.tokenizer.pad_token_id)

    def run_step(self, model: nn.Module, step: Step, num_items: Tensor | float | None) -> Tensor:
        """Forward and backward pass of all micro-batches of a step; the last one synchronizes gradients."""
        loss = step.run(model, self.micro_step, num_items)
        loss = loss.to(self.args.device, non_blocking=True)  # without micro-batches, it is on the host
        self.current_step, self.step_loss = step, loss
        if step.micro_batches:
            self.account.switch("optimizer")
        return loss

    def full_loss(self, model: nn.Module, batch: Ready) -> LossOutput:
        """`loss`, and what parts do around it."""
        compute = partial(self.loss, model, batch)
        for around in self.parts.listeners["around_loss"]:
            compute = partial(around, self, batch, compute)
        return compute()

    def _evaluated(self, model: nn.Module, batches: Sequence[Ready], *, num_missing: int) -> Iterator[LossOutput]:
        """The loss of each micro-batch of an evaluation; then passes that only other ranks have a loss for."""
        for batch in batches:
            with self.accelerator.autocast():  # accelerate wraps the model's forward only once training has started
                output = self.full_loss(model, batch.to(self.args.device))
            yield output
        for _ in range(num_missing):
            self.forward_sum(model, self._idle_batch().to(self.args.device))

    def forward_sum(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Scalar that depends on every parameter of the forward pass, so that each gets a gradient."""
        return self.scorer.scores(model, batch, want=()).logprobs.sum()

    def cut(self, batch: Ready, rows_per_micro_batch: int) -> list[Ready]:
        """Cut a batch into micro-batches, by tokens if `max_tokens_per_micro_batch` is set, otherwise by rows."""
        if self.args.max_tokens_per_micro_batch is not None:
            return batch.split(self.args.max_tokens_per_micro_batch)
        return batch.chunks(rows_per_micro_batch)

    @cached_property
    def flops_of_token(self) -> int:
        """Operations of a forward and a backward pass: 6 for each parameter outside embeddings."""
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

    @cached_property
    def phases(self) -> list[str]:
        """All phases that a step of this trainer may have: the names in `time/<phase>_s`."""
        return ["forward", "backward", "optimizer", *self.scorer.phases]

    # Changes of what HuggingFace does.

    def group_parameters(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Give a new optimizer its parameter groups."""
        group_parameters(optimizer, model, self.args)

    def adapt_scheduler(self, scheduler: Any, num_training_steps: int) -> Any:
        """Adapt a new schedule to this trainer."""
        return scheduler

    def penalized(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters in the penalty of a step."""
        return model.parameters()

    @property
    def evaluates_averages(self) -> bool:
        """Whether the weights that are evaluated now differ from those that are trained."""
        return averages_weights(self.optimizer) or any(self.parts.tell("has_replaced_weights", self))

    def run_evaluation(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        """See `Evaluation.run`."""
        return self.evaluation.run(dataloader, prefix)

    def close(self) -> None:
        """Release what other processes hold for this trainer."""

    # Checkpoints.

    def decisive(self) -> dict[str, Any]:
        """What decides the updates of this training, JSON values by name."""
        is_sought = self.args.sought == {"per_device_train_batch_size"}  # `found_sizes` says how many rows were found
        return {
            "algorithm": self.algorithm,
            "model": model_fingerprint(self.policy),
            "data": data_fingerprint(self.train_dataset, without=self._derived_columns),
            "rows_per_step": "auto" if is_sought else self.get_total_train_batch_size(self.args),
            **decisive_options(self.args),
        }

    def identity(self) -> Identity:
        """What checkpoints say about their run."""
        model = getattr(self.policy.config, "name_or_path", "")
        return Identity(run=self.run_folder.run, decisive=self.decisive(), model=model, sizes=self.found_sizes)

    def save_checkpoint(self) -> None:
        """Write a checkpoint now. All processes must call it."""
        self._save_checkpoint(self.model, None)

    def _save_update_state(self, folder: Path) -> None:
        """Write all other state that the next update depends on. All ranks must call it.

        HuggingFace saves the model, optimizer, scheduler and random states.
        """
        checkpointing.write_update_state(self, folder)
        self.parts.tell("save", self, folder)
        checkpointing.save_fingerprints(self._fingerprints(), folder, writes=self.args.should_save)

    def _load_update_state(self, folder: Path) -> None:
        """Read what `_save_update_state` wrote. All ranks must call it.

        Raises:
            ConfigError: The checkpoint was trained with a reference or teacher of other weights.
        """
        checkpointing.read_update_state(self, folder)
        self.parts.tell("load", self, folder)
        checkpointing.check_fingerprints(self._fingerprints(), folder)

    def _fingerprints(self) -> dict[str, str]:
        """Of the weights of a reference that does not move, and of a teacher, if there are any. All ranks call it."""
        kept = {"weights": None if self._reference_moves else self.reference, "teacher": self.scorer.teacher}
        return {name: model.fingerprint() for name, model in kept.items() if model is not None}

    def write_model(self, folder: Path) -> None:
        """Write model, tokenizer and options to a folder. All processes must call it."""
        state = whole_state(self.policy, keep=self.args.should_save)
        if self.args.should_save:
            self.write_state(folder, state)

    def write_state(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write the weights in `state`, None: the policy's own, tokenizer and options; on the process that writes."""
        self._save(str(folder), state)

    def load_weights(self, checkpoint: Path) -> None:
        """Put the weights of a checkpoint of this run into the policy. All ranks must call it."""
        best = self.state.best_model_checkpoint
        self.state.best_model_checkpoint = str(checkpoint)  # which HuggingFace loads
        self._load_best_model()
        self.state.best_model_checkpoint = best

    def best_loaded(self, checkpoint: Path) -> None:
        """The policy has the weights of a checkpoint."""
