"""HuggingFace's loop with our hooks in it: what `transformers.Trainer` calls in a training and an evaluation.

The methods stand in the order in which HuggingFace calls them. Each hands its call to `parts`, to what stands beside
this module, or to a method of `BaseTrainer` that a trainer may change. No other class overrides a hook of HuggingFace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import Trainer

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.metrics import Metric, merge
from prefrl.models.load import load_renamed
from prefrl.run.folder import StopRequest
from prefrl.trainer import checkpointing
from prefrl.trainer.evaluation import Evaluation, check_best_metric
from prefrl.trainer.features import Hub, parts_of
from prefrl.trainer.memory import TRAINING, explained, size_of
from prefrl.trainer.optimizers import (
    check_optimizer_of_run,
    optimizer_class,
    use_averaged_weights,
    use_trained_weights,
)
from prefrl.trainer.parts import Events, GoBack, Parts
from prefrl.trainer.progress.views import closed_at_end, contain_trackers
from prefrl.trainer.run_folder import RunFolder, StartingPoint
from prefrl.trainer.steps import Step, StepAccount, StepPlan, SyncStep, drained, limits_of
from prefrl.types import IdleBatch, TokenBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

    from prefrl.trainer.base_config import BaseConfig


class Loop(Trainer):
    """HuggingFace's loop, with whole checkpoints that only their own run reads, an orderly end, and parts."""

    algorithm: str  # name in the registry
    args: BaseConfig
    parts: Parts  # those of models, from the beginning
    account: StepAccount
    metrics: dict[Literal["train", "eval"], dict[str, Metric]]
    lr_scheduler: Any
    current_step: Step  # the one that runs or has run last
    step_loss: Tensor  # this process's share of its loss
    keeps_steps = True  # whether the first step that is not applied is written to `output_dir`
    _averages_weights = False  # whether the optimizer has two sets of weights
    _lacks_weights = False  # whether HuggingFace did not find all weights in a checkpoint
    _parallelism: Any  # how processes share the work
    dataset_name: str | None = None  # for the model card
    hub_model_id: str | None  # the repository's full name, once it is known to exist

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        self._hub = Hub(args)
        super().__init__(args=args, **arguments)
        check_optimizer_of_run(args, self.optimizer, self.accelerator)
        contain_trackers(self.callback_handler.callbacks)
        self.stop_request = StopRequest(args.max_train_time)
        self.run_folder = RunFolder.of(args, is_first_of_node=self.is_local_process_zero())
        self.start = StartingPoint("", None)
        self.found_sizes: Mapping[str, int] = {}  # what was "auto"
        self.failure: Exception | None = None  # ends training after this step's logs
        self.stop_code = 0  # of the request after which training stops; 0: there is none
        self.evaluation = Evaluation(self)
        for part in parts_of(self):
            self.parts.add(part)
        # A batch that grows is a part with a plan of its own.
        self.plan = self.parts.get(StepPlan) or StepPlan(args.steps_of_a_generation)
        # Behind HuggingFace's callback that decides what follows a step, and before all others.
        self.callback_handler.callbacks.insert(1, Events(self, begin=self._begin_training, end=self._end_training))

    # The beginning of a training.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Run HuggingFace's training loop.

        Args:
            resume_from_checkpoint: A checkpoint, which may be a URL. True or "auto" takes the last complete one in
                `output_dir` or else in `upload_to`, if there is one. None or "disable" starts anew.
            args: See HuggingFace's `train`.
            kwargs: See HuggingFace's `train`.

        Raises:
            ConfigError: Another process trains in `output_dir`, or these cannot use the checkpoint or train twice.
            CheckpointError: A checkpoint cannot be written.
            NonFiniteError: A loss, a gradient or a weight is NaN or infinite.
        """
        distributed.check_first_training(self.accelerator, self.model_wrapped)
        with self.run_folder.open(), checkpointing.without_memory(self):
            self.start, self.failure = checkpointing.begin(self, resume_from_checkpoint), None
            output = checkpointing.until_stopped(self, partial(self._train, *args, **kwargs))
            self.parts.tell("finished", self)
        self.show_ending(saved=False)
        return output

    def _train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """HuggingFace's loop, from a checkpoint or the start; again from a checkpoint if a part asks for that."""
        while True:
            try:
                folder = self.start.checkpoint
                return super().train(None if folder is None else str(folder), *args, **kwargs)
            except GoBack as request:
                self.start = replace(self.start, checkpoint=request.checkpoint)

    # HuggingFace's hooks, in the order in which it calls them: in its constructor, ...

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        return distributed.accelerator_arguments(super()._build_accelerator_args(**arguments), self._parallelism)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Training starts without the repository if the Hub cannot be reached.

        Raises:
            ConfigError: The Hub refuses to create the repository.
        """
        if self.is_world_process_zero():
            self._hub.try_to_create(self, token=token, private=private)

    # ... before the first step, ...

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """HuggingFace finds no weights whose names in checkpoints are not those in the model."""
        self._lacks_weights = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._lacks_weights:
            load_renamed(self.model, Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A weight is not missing if it is tied to one that is there, or kept elsewhere."""
        missing = [name for name in load_result.missing_keys if name not in checkpointing.kept_elsewhere(self.model)]
        self._lacks_weights = bool(missing)
        if not missing:
            super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The loop, whose data loader and schedule depend on sizes that parts may find."""
        with closed_at_end(self.callback_handler):
            self.parts.tell("prepare", self)
            self._train_batch_size = self.args.train_batch_size  # HuggingFace's copy, for its state
            return super()._inner_training_loop(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The rows of this process, in micro-batches; see `training_loader`."""
        if self.train_dataset is None:
            raise ConfigError("train_dataset=None: training needs a dataset")
        return self.training_loader()

    def get_total_train_batch_size(self, args: BaseConfig) -> int:
        """Rows of a step, over all ranks."""
        return int(args.rows_per_micro_batch * args.gradient_accumulation_steps * distributed.world_size())

    def set_initial_training_values(self, args: BaseConfig, dataloader: Any) -> tuple[Any, ...]:
        """The length of the training, whose steps are the last value: that of the first limit."""
        length_with = super().set_initial_training_values
        return min((length_with(limit, dataloader) for limit in limits_of(args)), key=lambda values: values[-1])

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """The state, and the epochs and the data loader's items that a checkpoint has done."""
        super()._init_training_state(max_steps, steps_per_epoch, num_epochs, checkpoint, trial)
        plan, step, folder = self.plan, self.state.global_step, None if checkpoint is None else Path(checkpoint)
        plan.start_at(step, total=max_steps, per_epoch=steps_per_epoch, checkpoint=folder)
        self.state.max_steps = step + plan.steps_left
        epochs, steps = divmod(plan.position, plan.per_epoch)
        return epochs, steps * self.args.gradient_accumulation_steps * (not self.args.ignore_data_skip)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """The model, in the backend's wrapper, with what the backend saved."""
        idle = IdleBatch.of_token().to(self.args.device)
        distributed.tell_ddp(self.accelerator, self.model, self.args, partial(self.forward_sum, self.model, idle))
        with nullcontext() if resume_from_checkpoint is None else distributed.only_data(Path(resume_from_checkpoint)):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """HuggingFace's optimizer, with parameter groups for Muon and for `learning_rates`."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            self.group_parameters(optimizer, self.model if model is None else model)
        return optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, Any]:
        """The class of the optimizer and its arguments."""
        return optimizer_class(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that the options ask for."""
        own = self.args.own_scheduler(self.lr_scheduler, optimizer or self.optimizer, num_training_steps)
        if own is not None:
            self.lr_scheduler, self._created_lr_scheduler = own, True
        return self.adapt_scheduler(super().create_scheduler(num_training_steps, optimizer), num_training_steps)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Their state, with the options that have changed since, and all other state of a checkpoint."""
        checkpointing.read_optimizer(self, checkpoint, partial(super()._load_optimizer_and_scheduler, checkpoint))
        if checkpoint is not None:
            self._load_update_state(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with nullcontext() if checkpoint is None else distributed.only_data(Path(checkpoint)):
            super()._load_rng_state(checkpoint)

    # ... in each step. HuggingFace updates the weights once `training_step` has had an item for each gradient
    # accumulation step, but a `Step` has any number of micro-batches: the last item is the whole step, and those
    # before it are empty, ...

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Without this, a run that is resumed at its end would make one more step."""
        if self.control.should_training_stop:
            return
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Step], float]:
        """Called once for each optimizer step: the step's items and its count over all ranks."""
        self.parts.tell("before_step", self)
        self.account.start()
        if self._averages_weights:
            use_trained_weights(self.optimizer)
        if not (items := self.plan.next_items(epoch_iterator, num_batches)):
            return [], 0.0
        step, count = self.make_step(items)
        return [*(SyncStep() for _ in items[1:num_batches]), step], count

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Tokens are counted where the step is made."""

    def training_step(self, model: nn.Module, inputs: Step, num_items_in_batch: Any = None) -> Any:
        """Forward and backward pass of all micro-batches of the step."""
        return self.run_step(model, inputs, num_items_in_batch)

    def micro_step(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """Forward and backward pass of one micro-batch; the last one of a step synchronizes gradients over ranks."""
        distributed.announce_backward(self.accelerator, is_last=is_last)
        # HuggingFace's training_step runs compute_loss, which is timed as the forward phase, and the backward pass.
        with (
            explained(lambda: f"the training pass of a micro-batch with {size_of(batch)}", self.args, TRAINING),
            self.account.phase("backward", "training", [batch]),
            nullcontext() if is_last else distributed.no_sync(model),
        ):
            loss: Tensor = super().training_step(model, batch, num_items)
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device) if isinstance(inputs, TokenBatch) else super()._prepare_inputs(inputs)

    def compute_loss(
        self, model: nn.Module, inputs: TokenBatch, return_outputs: bool = False, num_items_in_batch: Any = None
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
                return self.forward_sum(model, inputs) * 0.0
            output = self.full_loss(model, inputs)
        merge(self.metrics["train"], output.metrics)
        # A loss that is not finite shows in the gradients, too: DeepSpeed updates before anybody can look at the loss.
        total = output.total * (1.0 + 0.0 * output.total.detach())
        # Data-parallel backends average gradients over ranks, but items are counted over all of them.
        return total * (distributed.world_size() / max(float(num_items_in_batch), 1.0))

    def floating_point_ops(self, inputs: Step) -> int:
        """6 * parameters outside embeddings * tokens: HuggingFace's estimate, for the tokens that are processed."""
        return int(self.flops_of_token) * sum(batch.num_forward_tokens for batch in inputs.micro_batches)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Called unless `max_grad_norm` is 0."""
        self.parts.tell("gradients", self, model)
        return self.clip(model)

    def clip(self, model: nn.Module) -> Any:
        """Limit the norm of the gradients; returns what it was."""
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        """Called right before the update, with the norm before clipping or None."""
        if grad_norm is None:
            self.parts.tell("gradients", self, model)
        norm = super()._get_grad_norm(model, grad_norm)
        self.parts.tell("before_update", self, model, norm)
        return norm

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Called after the step and all its callbacks, and at the end of an epoch."""
        self.account.finish()
        checkpointing.decide_what_follows(self)
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()  # HuggingFace subtracts it from itself, which leaves NaN
        if self.failure is not None:
            raise self.failure

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log, under TRL's names; the last entry has those that no other has."""
        is_rest = "train_runtime" in logs and self._globalstep_last_logged < self.state.global_step
        if "loss" in logs or is_rest:
            merge(self.metrics["train"], self.account.drain(self.phases))
            logs |= drained(self.metrics, "train") | {"num_tokens": float(self.state.num_input_tokens_seen)}
        super().log(logs, start_time)

    # ... in an evaluation, ...

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics on the evaluation dataset, or on raw data given here; see also the option `evaluate_training_set`.

        If a moving average of the weights is kept, it is evaluated as `<prefix>_ema_...`.
        """
        metrics = self.evaluate_policy(eval_dataset, ignore_keys, metric_key_prefix)
        for name, weights in self.parts.other_weights(self):
            with weights:
                metrics |= self.evaluate_policy(eval_dataset, ignore_keys, f"{metric_key_prefix}_{name}")
        return metrics

    def evaluate_policy(self, eval_dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """The metrics of the policy with its current weights."""
        use_averaged_weights(self.optimizer)
        metrics: dict[str, float] = {}
        for name, dataset in self.evaluation.datasets(eval_dataset).items():
            metrics |= super().evaluate(dataset, ignore_keys, f"{prefix}{name}")
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions and labels for raw data, as `compute_metrics` gets them, and metrics, which are not logged.

        Raises:
            ConfigError: There is no dataset, or there are several.
        """
        if test_dataset is None or isinstance(test_dataset, Mapping):
            raise ConfigError(f"test_dataset is {type(test_dataset).__name__}: predict() needs one dataset")
        use_averaged_weights(self.optimizer)
        prepared = self.evaluation.prepared(test_dataset)
        with self.evaluation.predicting():
            return super().predict(prepared, ignore_keys, metric_key_prefix)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The rows of a prepared dataset, of the one with a name, or of the trainer's own; see `evaluation_loader`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.evaluation_loader(self.eval_dataset[dataset] if isinstance(dataset, str) else dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The means are over the whole dataset and all ranks."""
        return self.run_evaluation(dataloader, metric_key_prefix)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Called after each evaluation of a training."""
        check_best_metric(self.args, metrics)
        is_best: bool = super()._determine_best_metric(metrics, trial)
        return is_best

    # ... to write a checkpoint, ...

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The checkpoint is written aside, sealed and renamed: it is whole or it is not there."""
        if all(self.parts.tell("may_save", self)):
            folder = Path(self._get_output_dir(trial))
            final = checkpointing.write(self, folder, partial(super()._save_checkpoint, model, trial))
            if self.args.push_to_hub:
                self.run_folder.wait()
                self._hub.push_checkpoint(self, final)

    def _get_output_dir(self, trial: Any) -> str:
        """The folder in which HuggingFace writes `checkpoint-<step>`."""
        return str(self.run_folder.place_of_checkpoints(Path(super()._get_output_dir(trial))))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, overwrite: bool = False) -> None:
        """Save model, tokenizer and model card, so that `from_pretrained` can load them. All ranks must call it.

        Partitioned weights are gathered one at a time, on the process that writes. During training they are left to
        the backend's own checkpoint if its settings ask for partitioned checkpoints and `export_weights` is off.

        Args:
            output_dir: The folder. None means `output_dir` of the options.
            overwrite: Whether to replace a model of another run in the folder. This run's own is always replaced.

        Raises:
            CheckpointError: The folder holds a model of another run, which is kept; says where this one is saved.
        """
        use_averaged_weights(self.optimizer)
        if _internal_call and output_dir is not None:  # HuggingFace passes a folder only for checkpoints
            checkpointing.write_model_of_checkpoint(self, Path(output_dir))
            return
        checkpointing.write_models(self, Path(output_dir or self.args.output_dir), overwrite=overwrite)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Arguments are saved as JSON without secrets, not as a pickle with them."""
        with checkpointing.arguments_as_json(self.args, Path(output_dir or self.args.output_dir)):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpointing.write_optimizer(
            self, Path(output_dir), partial(super()._save_optimizer_and_scheduler, output_dir)
        )
        self._save_update_state(Path(output_dir))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Called before the checkpoint is in its place; see `_save_checkpoint`."""

    # ... and at the end.

    def _load_best_model(self) -> None:
        use_averaged_weights(self.optimizer)  # those of the best checkpoint are averaged, too
        self._lacks_weights = False
        folder = Path(str(self.state.best_model_checkpoint))
        with distributed.only_data(folder):
            super()._load_best_model()
            if self._lacks_weights:
                load_renamed(self.model, folder)
        self.best_loaded(folder)

    def _finish_current_push(self) -> None:
        """What is not uploaded yet is tried once more."""
        self._hub.finish(self)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write README.md, the model card, into `output_dir`; see `write_model_card` for the arguments."""
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            named = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
            checkpointing.write_card(self, Path(self.args.output_dir), **named)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to `output_dir` and upload it. All processes must call it; see HuggingFace's `push_to_hub`.

        Checkpoints, prompts and completions are not uploaded. `model_name`, `dataset_name` and `tags` go to the model
        card; other `kwargs`, of HuggingFace's model card, are ignored.

        Raises:
            HubError: The model cannot be uploaded. It is saved in the folder.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        named = {name: kwargs[name] for name in ("model_name", "dataset_name", "tags") if name in kwargs}
        self.create_model_card(**named)
        return self._hub.publish(self, commit_message, token=token, revision=revision, private=private, now=blocking)

    def end(self) -> None:
        """Releases servers, too."""
        self.close()
        super().end()
