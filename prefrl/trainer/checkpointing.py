"""Writes and reads the checkpoints of a training, whatever HuggingFace does not, and ends a training in order."""

from __future__ import annotations

import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME, TrainerState
from transformers.trainer_utils import IntervalStrategy

from prefrl import distributed
from prefrl.errors import ConfigError, DataError, OutOfMemoryError, RewardError, plain
from prefrl.models.adapters import is_peft_model
from prefrl.run.checkpoints import checkpoint_name, find_last, staging_folder
from prefrl.run.folder import Stopped, check_space, how_to_resume, leave, write_identity
from prefrl.trainer.memory import CHECKPOINT, UPDATE, explained
from prefrl.trainer.model_card import RunFacts, write_model_card
from prefrl.trainer.scheduler import refresh

if TYPE_CHECKING:
    from torch import nn
    from transformers.trainer_utils import TrainOutput

    from prefrl.models.reference import Reference
    from prefrl.options.preference import ReferenceOptions
    from prefrl.options.run import CheckpointParams
    from prefrl.trainer.base_config import BaseConfig
    from prefrl.trainer.parts import Run
    from prefrl.trainer.run_folder import StartingPoint

# HuggingFace's names of Adam with two moments for each weight.
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")


def begin(run: Run, given: str | bool | None) -> StartingPoint:
    """Find where a training starts, and check that it can be resumed and that its checkpoints can be written.

    Args:
        run: The training.
        given: `resume_from_checkpoint`.
    """
    args, folder = run.args, run.run_folder
    start = folder.start(given, run.identity(), allowed=args.allow_resume_changes or [])
    run.parts.tell("opened", run)
    if args.save_strategy != "no":
        distributed.on_main(lambda: check_space(folder.path, needed=_needed_bytes(run)))
    if start.checkpoint is not None:
        distributed.check_resumable(run.accelerator, start.checkpoint)
    check_parts(args.checkpoint_params, run.accelerator, start.checkpoint)
    folder.last_saved = -1
    return start


def _needed_bytes(run: Run) -> int:
    """Bytes of the weights and, with Adam, of its two moments in float32, and of what the parts write."""
    weights = list(run.model.parameters())
    saved = [p for p in weights if p.requires_grad] if is_peft_model(run.model) else weights
    size: int = sum(distributed.shape_of(p).numel() * p.element_size() for p in saved)
    has_state = run.args.checkpoint_params.save_optimizer and not run.args.save_only_model
    has_moments = has_state and run.args.optim in _ADAM
    trained = sum(distributed.shape_of(p).numel() for p in weights if p.requires_grad)
    of_parts: list[int] = run.parts.tell("checkpoint_bytes", run)
    return int(size + 8 * trained * has_moments) + sum(of_parts)


def until_stopped(run: Run, train: Callable[[], TrainOutput]) -> TrainOutput:
    """Train until the end, a signal or the deadline; then leave the process if training is not complete."""
    request, folder = run.stop_request, run.run_folder
    with request.listen():
        try:
            output = train()
            code = run.stop_code
        except Stopped:  # in a wait of the step that had begun; nothing has changed since the one before
            code = request.code
            if folder.last_saved != run.state.global_step:
                run.save_checkpoint()
    is_complete = not code or run.state.global_step >= run.state.max_steps
    folder.wait()
    run.parts.tell("left", run, is_complete)
    if not is_complete:
        if distributed.is_main():
            way = how_to_resume(run.args.output_dir)
            sys.stderr.write(f"stopped after step {run.state.global_step} of {run.state.max_steps}. {way}\n")
        leave(code)
    return output


def decide_what_follows(run: Run) -> None:
    """Save and stop after this step if any process was asked to; after a failure, only log, as after the last step."""
    control = run.control
    if run.failure is not None:
        control.should_log, control.should_evaluate, control.should_save = True, False, False
    else:
        (code,) = distributed.max_over_ranks([run.stop_request.code], run.args.device)
        run.stop_code = int(code)
        if code:
            control.should_training_stop = True
            control.should_save = run.run_folder.last_saved != run.state.global_step
    if control.should_training_stop and run.args.logging_strategy == IntervalStrategy.STEPS:
        control.should_log = True  # whatever logging_steps is


@contextmanager
def without_memory(run: Run) -> Iterator[None]:
    """Context of a training: if memory runs out, the error says where to go on."""
    try:
        with explained(
            lambda: f"step {run.state.global_step + 1}, in its update, a reward or a callback", run.args, UPDATE
        ):
            yield
    except OutOfMemoryError as error:
        last = find_last(run.run_folder.path, run=run.run_folder.run).folder
        start = "There is no checkpoint yet." if last is None else f"Resume from {last}: resume_from_checkpoint=True."
        raise OutOfMemoryError(f"{error} {start}") from error.__cause__


@contextmanager
def saved_at_errors(run: Run) -> Iterator[None]:
    """Context of a wait for rewards. Nothing changes that is saved: an error of rewards or rows loses no step.

    A single process saves a checkpoint before the error goes on, unless there is one or `save_strategy` is "no".
    After other errors, the journal is enough; and weights that cannot be sampled from must not push others out.
    """
    try:
        yield
    except (RewardError, DataError):
        step = run.state.global_step
        is_saved = (run.run_folder.path / checkpoint_name(step)).exists()
        if step and not is_saved and run.args.save_strategy != "no" and distributed.num_processes() == 1:
            run.save_checkpoint()
            run.run_folder.wait()
        raise


# Writing.


def write(run: Run, folder: Path, save: Callable[[], None]) -> Path:
    """Write a checkpoint aside, seal it and put it in its place.

    Args:
        run: The training.
        folder: That of the checkpoints.
        save: HuggingFace's, which writes to `RunFolder.place_of_checkpoints`.

    Returns:
        Its folder, which may not be there yet with `save_in_background`.

    Raises:
        CheckpointError: It cannot be written.
    """
    place, step, state = run.run_folder, run.state.global_step, run.state
    place.wait()
    try:
        with place.staged(), explained(lambda: f"writing {checkpoint_name(step)}", run.args, CHECKPOINT):
            save()
            staging = staging_folder(folder)
            best = state.best_model_checkpoint
            if best is not None and Path(best).is_relative_to(staging):
                state.best_model_checkpoint = str(folder / Path(best).name)
            if run.args.should_save:
                state.save_to_json(str(staging / checkpoint_name(step) / TRAINER_STATE_NAME))
                write_identity(staging / checkpoint_name(step), run.identity())
    except OutOfMemoryError:
        shutil.rmtree(staging_folder(folder), ignore_errors=True)
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise place.failure(error, folder, step) from error
    complete = not run.args.save_only_model
    final = place.publish(folder, step=step, resumable=complete, best=state.best_model_checkpoint)
    place.last_saved = step
    return final


@contextmanager
def arguments_as_json(args: BaseConfig, folder: Path) -> Iterator[None]:
    """After HuggingFace has saved the arguments inside, the folder has them as JSON without secrets, not as a pickle.

    Functions among them, which not every pickle can have, are named inside.
    """
    options: dict[str, Any] = args.__dict__
    functions = {name: value for name, value in options.items() if callable(value)}
    options.update({name: plain(value) for name, value in functions.items()})
    try:
        yield
    finally:
        options.update(functions)
    (folder / TRAINING_ARGS_NAME).unlink()
    (folder / "training_args.json").write_text(args.to_json_string(), encoding="utf-8")


def write_model_of_checkpoint(run: Run, folder: Path) -> None:
    """Write model and card into a checkpoint; not the weights, if the backend has written its parts of them."""
    is_partitioned = distributed.keeps_checkpoints_partitioned(run.accelerator)
    if not is_partitioned or run.args.checkpoint_params.export_weights:
        run.write_model(folder)
    if run.args.should_save:
        write_card(run, folder)


def write_models(run: Run, folder: Path, *, overwrite: bool) -> None:
    """Write model and card to a folder, and other weights that the parts have to folders in it.

    Args:
        run: The training.
        folder: Where to.
        overwrite: Whether to replace a model of another run in the folder.
    """
    with run.run_folder.model_in(folder, run.identity(), overwrite=overwrite) as place:
        for name, weights in run.parts.other_weights(run):
            with weights:
                _write_described(run, place / name)
        _write_described(run, place)


def _write_described(run: Run, folder: Path) -> None:
    run.write_model(folder)
    if run.args.should_save:
        write_card(run, folder)


def write_card(run: Run, folder: Path, **named: Any) -> None:
    """Write README.md; see `write_model_card`."""
    base, history = str(run.policy.config.name_or_path), run.state.log_history
    named["dataset_name"] = named.get("dataset_name") or run.dataset_name
    facts = RunFacts.of(run.args, run.decisive())
    write_model_card(folder, algorithm=run.algorithm, base_model=base, log_history=history, facts=facts, **named)


def write_optimizer(run: Run, folder: Path, save: Callable[[], None]) -> None:
    """Write optimizer and schedule, by HuggingFace's `save`, or the schedule alone."""
    if run.args.checkpoint_params.save_optimizer:
        save()
    elif run.args.should_save:
        save_schedule(run.lr_scheduler, folder)
    # The main process creates the folder, but other processes may get here first.
    folder.mkdir(parents=True, exist_ok=True)


def write_update_state(run: Run, folder: Path) -> None:
    """Write who wrote the checkpoint, and the state of callbacks."""
    if run.args.should_save:
        distributed.sign_checkpoint(run.accelerator, folder)
        for callback in stateful(run):
            callback.save_state(folder)


# Reading.


def read_optimizer(run: Run, checkpoint: str | None, load: Callable[[], None]) -> None:
    """Read optimizer and schedule, by HuggingFace's `load`, or the schedule alone; changed options have effect."""
    asked = GroupSettings.of(run.optimizer) if run.start.changed else None
    if checkpoint is None or run.args.checkpoint_params.load_optimizer:
        load()
    else:
        load_schedule(run.lr_scheduler, run.optimizer, Path(checkpoint))
    if asked is not None:
        asked.apply(run.start.changed, run.optimizer, run.lr_scheduler)
    if checkpoint is not None:
        run.state.best_model_checkpoint = best_beside(Path(checkpoint)) or run.state.best_model_checkpoint


def read_update_state(run: Run, folder: Path) -> None:
    """Read the state of callbacks."""
    for callback in stateful(run):
        callback.load_state(folder)


def stateful(run: Run) -> list[StatefulCallback]:
    """The callbacks of a training that have a state."""
    return [callback for callback in run.callback_handler.callbacks if isinstance(callback, StatefulCallback)]


def kept_elsewhere(model: nn.Module) -> set[str]:
    """Names of weights that HuggingFace misses in a checkpoint, but that are tied to others, or kept elsewhere."""
    return {
        *getattr(model, "all_tied_weights_keys", {}),
        *(getattr(model, "_keys_to_ignore_on_save", None) or ()),
    }


class StatefulCallback(TrainerCallback, ABC):
    """A callback whose state is written into checkpoints, and read when training resumes.

    One that `moves_reference` gets the reference model by `take_reference`; what it makes of it is saved, too.
    """

    moves_reference = False

    def take_reference(self, reference: Reference, options: ReferenceOptions) -> None:
        """Called in the trainer's constructor, if `moves_reference`."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write the state into a checkpoint. Called on the process that writes."""

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote. Called on all processes, before `on_train_begin`."""


_RATES = frozenset({"critic_learning_rate", "learning_rate"})
# Option -> what it sets in parameter groups.
_SETTINGS = {
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
    "critic_optim_kwargs": ("betas", "eps", "weight_decay"),
    "weight_decay": ("weight_decay",),
    "weight_decay_schedule": ("weight_decay",),
}


@dataclass(frozen=True)
class GroupSettings:
    """The settings of a new optimizer's parameter groups, whose state is about to be read from a checkpoint."""

    learning_rates: list[float]  # one for each parameter group, at the start of the schedule
    settings: list[dict[str, Any]]  # what `_SETTINGS` names, and the group has

    @classmethod
    def of(cls, optimizer: Any) -> GroupSettings:
        """What the options of this run ask for.

        Args:
            optimizer: Before its state is read.
        """
        groups = optimizer.param_groups
        return cls(
            [group.get("initial_lr", group["lr"]) for group in groups],
            [{key: group[key] for keys in _SETTINGS.values() for key in keys if key in group} for group in groups],
        )

    def apply(self, changed: Collection[str], optimizer: Any, scheduler: Any) -> None:
        """Give the changed options effect again, after the state was read.

        Args:
            changed: Names of the options that differ from the checkpoint.
            optimizer: After its state was read.
            scheduler: Its schedule, which may be another one now, goes on from the same step; learning rates are
                proportional to those at its start.
        """
        keys = {key for option in changed for key in _SETTINGS.get(option, ())}
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update({key: value for key, value in settings.items() if key in keys})
        if not _RATES.isdisjoint(changed):
            for group, initial in zip(optimizer.param_groups, self.learning_rates, strict=True):
                before = group["initial_lr"]  # 0 for weights that learning_rates freezes
                group["lr"] = group["lr"] * initial / before if before else initial
                group["initial_lr"] = initial
            scheduler.base_lrs = list(self.learning_rates)
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # what is logged
        if isinstance(scheduler, LambdaLR):
            refresh(scheduler)


def check_parts(params: CheckpointParams, accelerator: Any, checkpoint: Path | None) -> None:
    """Check that the backend can do what is asked for, and that a checkpoint holds what is to be read of it.

    Args:
        params: Options.
        accelerator: The trainer's accelerator.
        checkpoint: What training resumes from. None means nothing.

    Raises:
        ConfigError: It cannot, or the checkpoint lacks something.
    """
    for name, value in (("save_optimizer", params.save_optimizer), ("load_optimizer", params.load_optimizer)):
        if not value and not distributed.keeps_optimizer_apart(accelerator):
            raise ConfigError(
                f"checkpoint_kwargs: {name}=False is not supported with ZeRO and FSDP2, which save weights and "
                "optimizer state together. Leave it out; save_only_model=True saves only the model."
            )
    if checkpoint is None or not params.load_optimizer or not distributed.keeps_optimizer_apart(accelerator):
        return
    if not (checkpoint / OPTIMIZER_NAME).exists():
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} holds no optimizer state (from save_optimizer=False): resuming is "
            "not exact. Set checkpoint_kwargs={'load_optimizer': False} to begin with new optimizer states."
        )


def save_schedule(scheduler: Any, folder: Path) -> None:
    """Write the state of the schedule alone."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_schedule(scheduler: Any, optimizer: Any, folder: Path) -> None:
    """Read the state of the schedule, and give a new optimizer its learning rates and weight decays."""
    scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    if isinstance(scheduler, LambdaLR):
        for group, rate in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["initial_lr"] = rate
        refresh(scheduler)


def best_beside(checkpoint: Path) -> str | None:
    """The best checkpoint, if it stands beside the one that training resumes from: both may have moved since.

    Args:
        checkpoint: What training resumes from.
    """
    best = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).best_model_checkpoint
    beside = checkpoint.parent / Path(best).name if best else checkpoint / "none"
    return str(beside) if beside.is_dir() else None


_FINGERPRINT_FILE = "reference.json"


def save_fingerprints(fingerprints: Mapping[str, str], folder: Path, *, writes: bool) -> None:
    """Write the fingerprints of the weights of a reference that does not move and of a teacher, if there are any."""
    if fingerprints and writes:
        (folder / _FINGERPRINT_FILE).write_text(json.dumps(fingerprints), encoding="utf-8")


def check_fingerprints(fingerprints: Mapping[str, str], folder: Path) -> None:
    """Reject a resume with another reference or teacher than those that the checkpoint was trained with.

    Args:
        fingerprints: Those of the weights of this run's reference and teacher.
        folder: The checkpoint.

    Raises:
        ConfigError: The checkpoint has another fingerprint.
    """
    path = folder / _FINGERPRINT_FILE
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, now in fingerprints.items():
        if (saved := written.get(name, now)) != now:
            what = "reference" if name == "weights" else name
            raise ConfigError(
                f"the checkpoint was trained against another {what}: the fingerprint of its weights is {saved}, this "
                f"run's is {now}. Construct the trainer with the model (and ref_model or teacher_model, if there was "
                "one) that the run started from, not with the checkpoint's."
            )
