"""A HuggingFace trainer whose runs survive: whole checkpoints, refusal of wrong ones, an orderly end at signals."""

from __future__ import annotations

import logging
import shutil
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy, IntervalStrategy

from prefrl import distributed
from prefrl.errors import DataError, HubError, OutOfMemoryError, RewardError
from prefrl.models.adapters import is_peft_model
from prefrl.models.load import load_renamed
from prefrl.printable import reason_of
from prefrl.run.checkpoints import checkpoint_name, find_last, staging_folder
from prefrl.run.folder import check_space
from prefrl.run.records import Identity, write_identity
from prefrl.run.stop import Stopped, StopRequest, leave
from prefrl.trainer.base.checkpoints.changed_options import GroupOptions
from prefrl.trainer.base.checkpoints.partial_state import best_beside, check_parts, load_schedule, save_schedule
from prefrl.trainer.base.checkpoints.saving import RunFolder, Start
from prefrl.trainer.base.checkpoints.stateful_callback import StatefulCallback
from prefrl.trainer.base.hub import Hub, tell_not_created
from prefrl.trainer.base.memory import CHECKPOINT, UPDATE, explained
from prefrl.trainer.base.model_card import RunFacts, write_model_card
from prefrl.trainer.base.optimized import OptimizedTrainer
from prefrl.trainer.base.optimizers.schedule_free import use_averaged_weights
from prefrl.trainer.base.step_plan import StepPlan
from prefrl.trainer.base.trackers import contain_trackers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.trainer_utils import TrainOutput

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["ResumableTrainer"]

_log = logging.getLogger(__name__)

# HuggingFace's names of Adam with two moments for each weight.
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")
# The arguments of `push_to_hub` that the model card shows.
_OF_CARD = ("model_name", "dataset_name", "tags")


class ResumableTrainer(OptimizedTrainer):
    """HuggingFace's loop, with checkpoints that are whole or not there, and that only their own run reads.

    Args:
        args: Options.
        arguments: See HuggingFace's `Trainer`.
    """

    algorithm: str  # name in the registry
    args: BaseConfig
    dataset_name: str | None = None  # for the model card
    hub_model_id: str | None  # the repository's full name, once it is known to exist
    plan: StepPlan

    def __init__(self, *, args: BaseConfig, **arguments: Any) -> None:
        self._hub = Hub(args)
        super().__init__(args=args, **arguments)
        contain_trackers(self.callback_handler.callbacks)
        self.plan = StepPlan(args, unit=args.steps_of_a_generation)
        self.callback_handler.callbacks.insert(0, self.plan)  # others shall see its epoch
        self.stop_request = StopRequest(args.max_train_time)
        self.run_folder = RunFolder(
            Path(args.output_dir),
            limit=args.save_total_limit,
            in_background=args.save_in_background,
            is_first_of_node=self.is_local_process_zero(),
            upload_to=args.upload_to,
            upload=args.upload_params if args.uploads_checkpoints else None,
        )
        self._stop_code = 0
        self._is_saving = False
        self._last_saved = -1  # step of the last checkpoint
        self._lacks_weights = False  # whether HuggingFace did not find all weights in a checkpoint
        self._start = Start("", None)

    @property
    def policy(self) -> PreTrainedModel:
        """The model that is trained, without the backend's wrapper."""
        return cast("PreTrainedModel", distributed.unwrap(self.model))

    @abstractmethod
    def decisive(self) -> dict[str, Any]:
        """What decides the updates of this training, JSON values by name."""

    def _identity(self) -> Identity:
        model = getattr(self.policy.config, "name_or_path", "")
        return Identity(run=self.run_folder.run, decisive=self.decisive(), model=model)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Run HuggingFace's training loop.

        Args:
            resume_from_checkpoint: A checkpoint, also by URL; True or "auto" for the last whole one in `output_dir`,
                else in `upload_to`, with none, training starts at step 0; None or "disable" for a new training.
            args: See HuggingFace's `train`.
            kwargs: See HuggingFace's `train`.

        Raises:
            ConfigError: Another process trains in `output_dir`, the checkpoint is not whole or belongs to another run,
                or these processes cannot read it or cannot train a second time.
            CheckpointError: A checkpoint cannot be written.
        """
        distributed.check_first_training(self.accelerator, self.model_wrapped)
        with self.run_folder.open(), self._resumable_without_memory():
            allowed = self.args.allow_resume_changes or []
            start = self.run_folder.start(resume_from_checkpoint, self._identity(), allowed=allowed)
            if self.args.save_strategy != "no":
                distributed.on_main(lambda: check_space(self.run_folder.path, needed=self._checkpoint_bytes()))
            if start.checkpoint is not None:
                distributed.check_resumable(self.accelerator, start.checkpoint)
            check_parts(self.args.checkpoint_params, self.accelerator, start.checkpoint)
            self._start = start
            self._last_saved = -1
            return self._train(None if start.checkpoint is None else str(start.checkpoint), *args, **kwargs)

    def get_total_train_batch_size(self, args: BaseConfig) -> int:
        """HuggingFace's hook: rows of a step, over all ranks."""
        return int(args.rows_per_micro_batch * args.gradient_accumulation_steps * distributed.world_size())

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Tokens are counted in `BaseTrainer.get_batch_samples`."""

    @contextmanager
    def _resumable_without_memory(self) -> Iterator[None]:
        """Context of a training: if memory runs out, the error says where to go on."""
        try:
            with explained(
                lambda: f"step {self.state.global_step + 1}, in its update, a reward or a callback", self.args, UPDATE
            ):
                yield
        except OutOfMemoryError as error:
            last = find_last(self.run_folder.path, run=self.run_folder.run).folder
            start = (
                "There is no checkpoint yet." if last is None else f"Resume from {last}: resume_from_checkpoint=True."
            )
            raise OutOfMemoryError(f"{error} {start}") from error.__cause__

    def _checkpoint_bytes(self) -> int:
        """Bytes of the weights and, with Adam, of its two moments in float32; other files are small."""
        weights = list(self.model.parameters())
        saved = [p for p in weights if p.requires_grad] if is_peft_model(self.model) else weights
        size: int = sum(distributed.shape_of(p).numel() * p.element_size() for p in saved)
        has_state = self.args.checkpoint_params.save_optimizer and not self.args.save_only_model
        has_moments = has_state and self.args.optim in _ADAM
        trained = sum(distributed.shape_of(p).numel() for p in weights if p.requires_grad)
        return int(size + 8 * trained * has_moments)

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train until the end, a signal or the deadline; then leave the process if training is not complete."""
        with self.stop_request.listen():
            try:
                output = self._run(checkpoint, *args, **kwargs)
                code = self._stop_code
            except Stopped:  # in a wait of the step that had begun; nothing has changed since the one before
                code = self.stop_request.code
                if self._last_saved != self.state.global_step:
                    self._save_checkpoint(self.model, None)
        is_complete = not code or self.state.global_step >= self.state.max_steps
        self.run_folder.finish(is_complete=is_complete)
        if not is_complete:
            if distributed.is_main():
                sys.stderr.write(
                    f"stopped after step {self.state.global_step} of {self.state.max_steps}. To continue, start the "
                    f"same training with resume_from_checkpoint=True; output_dir is {self.args.output_dir}\n"
                )
            leave(code)
        return output

    def _run(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        """HuggingFace's loop, from a checkpoint or the start."""
        return super().train(checkpoint, *args, **kwargs)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context of a wait for rewards. Nothing changes that is saved: an error of rewards or rows loses no step.

        A single process saves a checkpoint before the error goes on, unless there is one or `save_strategy` is "no".
        After other errors, the journal is enough; and weights that cannot be sampled from must not push others out.
        """
        try:
            yield
        except (RewardError, DataError):
            step = self.state.global_step
            is_saved = (self.run_folder.path / checkpoint_name(step)).exists()
            if step and not is_saved and self.args.save_strategy != "no" and distributed.num_processes() == 1:
                self._save_checkpoint(self.model, None)
                self.run_folder.wait()
            raise

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """HuggingFace's hook: loads what the backend saved."""
        with nullcontext() if resume_from_checkpoint is None else distributed.only_data(Path(resume_from_checkpoint)):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """HuggingFace's hook."""
        with nullcontext() if checkpoint is None else distributed.only_data(Path(checkpoint)):
            super()._load_rng_state(checkpoint)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """HuggingFace's hook: the state, and the epochs and the data loader's items that a checkpoint has done."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial)
        plan, folder = self.plan, None if checkpoint is None else Path(checkpoint)
        plan.begin(folder, step=self.state.global_step, total=max_steps, per_epoch=num_update_steps_per_epoch)
        self.state.max_steps = self.state.global_step + plan.steps_left
        epochs, steps = divmod(plan.position, plan.per_epoch)
        return epochs, steps * self.args.gradient_accumulation_steps * (not self.args.ignore_data_skip)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """HuggingFace's hook. It finds no weights whose names in checkpoints are not those in the model."""
        self._lacks_weights = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._lacks_weights:
            load_renamed(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        use_averaged_weights(self.optimizer)  # those of the best checkpoint are averaged, too
        self._lacks_weights = False
        folder = Path(str(self.state.best_model_checkpoint))
        with distributed.only_data(folder):
            super()._load_best_model()
            if self._lacks_weights:
                load_renamed(self.model, folder)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """HuggingFace's hook. A weight is not missing if it is tied to one that is there, or kept elsewhere."""
        elsewhere = {
            *getattr(self.model, "all_tied_weights_keys", {}),
            *(getattr(self.model, "_keys_to_ignore_on_save", None) or ()),
        }
        missing = [name for name in load_result.missing_keys if name not in elsewhere]
        self._lacks_weights = bool(missing)
        if not missing:
            super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook, called after the step and all its callbacks."""
        self._stop_if_asked()
        if self.control.should_training_stop and self.args.logging_strategy == IntervalStrategy.STEPS:
            self.control.should_log = True  # the last step, whatever logging_steps is
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _stop_if_asked(self) -> None:
        """Save and stop after this step if any process was asked to."""
        (code,) = distributed.max_over_ranks([self.stop_request.code], self.args.device)
        self._stop_code = int(code)
        if code:
            self.control.should_training_stop = True
            self.control.should_save = self._last_saved != self.state.global_step

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """HuggingFace's hook. Without this, a run that is resumed at its end would make one more step."""
        if self.control.should_training_stop:
            return
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        """HuggingFace's hook: the folder in which it writes `checkpoint-<step>`."""
        folder: str = super()._get_output_dir(trial)
        return str(staging_folder(Path(folder))) if self._is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """HuggingFace's hook. The checkpoint is written aside, sealed and renamed: it is whole or it is not there."""
        self.run_folder.wait()
        folder, step = Path(self._get_output_dir(trial)), self.state.global_step
        self._is_saving = True
        try:
            with explained(lambda: f"writing {checkpoint_name(step)}", self.args, CHECKPOINT):
                super()._save_checkpoint(model, trial)
                self._finish_state(folder)
        except OutOfMemoryError:
            shutil.rmtree(staging_folder(folder), ignore_errors=True)
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            raise self.run_folder.failure(error, folder, step) from error
        finally:
            self._is_saving = False
        complete, best = not self.args.save_only_model, self.state.best_model_checkpoint
        final = self.run_folder.publish(folder, step=step, resumable=complete, best=best)
        self._last_saved = step
        if self.args.push_to_hub:
            self.run_folder.wait()
            self._push_checkpoint(final)

    def _finish_state(self, folder: Path) -> None:
        """Write what a checkpoint says about the run, and where the best checkpoint will be."""
        staging, step = staging_folder(folder), self.state.global_step
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).is_relative_to(staging):
            self.state.best_model_checkpoint = str(folder / Path(best).name)
        if self.args.should_save:
            staged = staging / checkpoint_name(step)
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            write_identity(staged, self._identity())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """HuggingFace's hook. Arguments are saved as JSON without secrets, not as a pickle with them."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink()
        (folder / "training_args.json").write_text(self.args.to_json_string(), encoding="utf-8")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, overwrite: bool = False) -> None:
        """Save model, tokenizer and model card, so that `from_pretrained` can load them. All ranks must call it.

        Partitioned weights are gathered one at a time, on the process that writes. During training they are left to
        the backend's own checkpoint if its settings ask for partitioned checkpoints and `export_weights` is off.

        Args:
            output_dir: The folder; None: `output_dir` of the options.
            overwrite: Whether to replace a model of another run in the folder. This run's own is always replaced.

        Raises:
            CheckpointError: The folder holds a model of another run, which is kept; says where this one is saved.
        """
        use_averaged_weights(self.optimizer)
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call and output_dir is not None:  # HuggingFace passes a folder only for checkpoints
            self._write_described(folder, is_checkpoint=True)
            return
        with self.run_folder.model_in(folder, self._identity(), overwrite=overwrite) as place:
            self._write_described(place, is_checkpoint=False)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_described(self, folder: Path, *, is_checkpoint: bool) -> None:
        is_partitioned = is_checkpoint and distributed.keeps_checkpoints_partitioned(self.accelerator)
        if not is_partitioned or self.args.checkpoint_params.export_weights:
            self.write_model(folder)
        if self.args.should_save:
            self._write_card(folder)

    @abstractmethod
    def write_model(self, folder: Path) -> None:
        """Write model, tokenizer and options to a folder. All processes must call it."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.checkpoint_params.save_optimizer:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            save_schedule(self.lr_scheduler, Path(output_dir))
        # The main process creates the folder, but other processes may get here first.
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        self._save_update_state(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        asked = GroupOptions.of(self.optimizer) if self._start.changed else None
        if checkpoint is None or self.args.checkpoint_params.load_optimizer:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_schedule(self.lr_scheduler, self.optimizer, Path(checkpoint))
        if asked is not None:
            asked.apply(self._start.changed, self.optimizer, self.lr_scheduler)
        if checkpoint is not None:
            self.state.best_model_checkpoint = best_beside(Path(checkpoint)) or self.state.best_model_checkpoint
            self._load_update_state(Path(checkpoint))

    def _save_update_state(self, folder: Path) -> None:
        """Write all other state that the next update depends on. All ranks must call it.

        HuggingFace saves the model, optimizer, scheduler and random states.
        """
        if self.args.should_save:
            distributed.sign_checkpoint(self.accelerator, folder)
            for callback in self._stateful_callbacks():
                callback.save_state(folder)

    def _load_update_state(self, folder: Path) -> None:
        """Read what `_save_update_state` wrote. All ranks must call it."""
        for callback in self._stateful_callbacks():
            callback.load_state(folder)

    def _stateful_callbacks(self) -> list[StatefulCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StatefulCallback)]

    # The Hub, on which a run does not depend.

    def _repository(self) -> str:
        """The name of the repository, or the one that it will get."""
        return str(self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name)

    def _create_repository(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, if that has not been done yet."""
        if self.hub_model_id is None:
            self.hub_model_id = self._hub.create(self._repository(), token=token, private=private)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """HuggingFace's hook, called by its constructor. If the Hub is out of reach, training begins without it.

        Raises:
            ConfigError: The Hub refuses to create the repository.
        """
        if not self.is_world_process_zero():
            return
        try:
            self._create_repository(token, private)
        except Exception as error:
            tell_not_created(self._repository(), error)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """HuggingFace's hook, called before the checkpoint is in its place; see `_save_checkpoint`."""

    def _push_checkpoint(self, checkpoint: Path) -> None:
        """Upload a checkpoint in the background, as `hub_strategy` says. If it fails, that is a warning."""
        if self.args.hub_strategy == HubStrategy.END or not self.is_world_process_zero():
            return
        self._hub.note(checkpoint)
        if self.args.hub_always_push or not self._hub.is_busy:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self._push_noted()

    def _push_noted(self) -> None:
        try:
            self._create_repository()
            self._hub.push_noted(self._repository())
        except Exception as error:
            name = self._hub.noted[0].name if self._hub.noted else "a checkpoint"
            _log.warning("%s could not be pushed to the Hub; training continues: %s", name, reason_of(error))

    def _finish_current_push(self) -> None:
        """HuggingFace's hook, called at the end of training: what is not uploaded yet is tried once more."""
        self._hub.wait()
        if self._hub.noted:
            self._push_noted()
            self._hub.wait()

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write README.md, the model card, into `output_dir`; see `write_model_card` for the arguments."""
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            self._write_card(Path(self.args.output_dir), model_name=model_name, dataset_name=dataset_name, tags=tags)

    def _write_card(self, folder: Path, **named: Any) -> None:
        base, history = str(self.policy.config.name_or_path), self.state.log_history
        named["dataset_name"] = named.get("dataset_name") or self.dataset_name
        facts = RunFacts.of(self.args, self.decisive())
        write_model_card(folder, algorithm=self.algorithm, base_model=base, log_history=history, facts=facts, **named)

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
            HubError: It cannot be uploaded. It is saved.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**{name: kwargs[name] for name in _OF_CARD if name in kwargs})
        self._hub.wait()
        try:
            self._create_repository(token, private)
            return self._hub.push(
                self._repository(), message=commit_message, token=token, revision=revision, now=blocking
            )
        except Exception as error:
            name, state = self._repository(), self.state
            complete = "Training is complete. " if 0 < state.max_steps <= state.global_step else ""
            raise HubError(
                f"{name} could not be pushed to the Hub: {reason_of(error)}. {complete}The model is saved in "
                f"{self.args.output_dir}. To push it: {self._hub.command(name)}"
            ) from error
