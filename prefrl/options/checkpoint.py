"""Options of what a run writes besides its model: checkpoints, their uploads, and traces of steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from prefrl.errors import without_secrets
from prefrl.options.fields import apply, example, opt, when
from prefrl.options.params import Params, hyperparameters
from prefrl.options.types import Seconds


@hyperparameters
class CheckpointParams(Params):
    """What checkpoints hold besides the model, and what is read of them."""

    save_optimizer: bool = opt(
        True,
        "Save the optimizer's state, which with Adam is two thirds of a checkpoint. False: resuming is not exact.",
    )
    load_optimizer: bool = opt(
        True, "Resume with the optimizer's state. False: moments begin at 0, while schedule, data and steps continue."
    )
    export_weights: bool = opt(
        False,
        "Also write complete weights, which from_pretrained can load, if ZeRO-3 or FSDP2 saves partitioned ones. "
        "Other backends always write complete weights.",
    )


@hyperparameters
class UploadParams(Params):
    """Settings of uploads to `upload_to`."""

    checkpoints: Literal["all", "final"] = opt(
        "all", "all: every checkpoint, the last first. final: the last one, when training is complete."
    )
    timeout: Seconds = opt(
        600.0,
        "Maximum time to wait for uploads at the end of training, in seconds; other processes wait at most "
        "ddp_timeout.",
    )


CHECKPOINTS_RULES = (
    when(
        lambda o: o.save_only_model and not o.checkpoint_params.save_optimizer,
        "checkpoint_kwargs: save_optimizer=False has no effect because save_only_model=True saves no training state "
        "at all. Remove one of them.",
        example("sft", save_only_model=True, checkpoint_kwargs={"save_optimizer": False}),
    ),
    when(
        lambda o: o.on_spike == "rollback" and not o.checkpoint_params.save_optimizer,
        "checkpoint_kwargs: save_optimizer=False with on_spike='rollback': training cannot go back to a checkpoint "
        "without the optimizer's state. Change one of them.",
        example("sft", on_spike="rollback", checkpoint_kwargs={"save_optimizer": False}),
    ),
)
# With upload_to.
UPLOADS_RULES = (
    when(
        lambda o: o.save_strategy == "no",
        "upload_to={place!r} has no effect because save_strategy='no': there are no checkpoints. Set "
        "save_strategy='steps', or leave upload_to out.",
        example("sft", upload_to="copies", save_strategy="no"),
        place=lambda o: without_secrets(o.upload_to),
    ),
    when(
        lambda o: Path(o.upload_to.removeprefix("file://")).resolve() == Path(o.output_dir).resolve(),
        "upload_to={upload_to!r} is output_dir itself. Name another folder.",
        example("sft", upload_to="runs", output_dir="runs"),
    ),
)


def check_checkpoints(config: Any) -> None:
    """Reject options of checkpoints that cannot be combined.

    Raises:
        ConfigError: Names the field, its value and what to do.
    """
    apply(config, CHECKPOINTS_RULES)
    if config.upload_to is None:
        return
    if isinstance(config.upload_to, os.PathLike):
        config.upload_to = os.fspath(config.upload_to)
    from prefrl.run.uploads import check_place  # needs fsspec, which the other checks do not

    check_place("upload_to", config.upload_to)
    apply(config, UPLOADS_RULES)


@hyperparameters
class ProfileParams(Params):
    """Which steps of which processes are traced, counted from where training starts or resumes, and what of them.

    After `skip_first` steps, `wait` + `warmup` + `active` steps follow each other `repeat` times; the active ones are
    traced. Source: `torch.profiler.schedule`.
    """

    wait: Annotated[int, Ge(0)] = opt(1, "Steps at the start of each cycle without profiling.")
    warmup: Annotated[int, Ge(0)] = opt(
        1, "Steps that are profiled but not kept, because starting the profiler distorts them."
    )
    active: Annotated[int, Ge(1)] = opt(3, "Steps in a trace.")
    repeat: Annotated[int, Ge(0)] = opt(1, "Number of cycles, each with its own trace; 0: until training ends.")
    skip_first: Annotated[int, Ge(0)] = opt(0, "Steps before the first cycle.")
    ranks: list[int] | None = opt([0], "Processes that write traces; None: all.")
    record_shapes: bool = opt(False, "Record the shapes of the inputs of operations.")
    profile_memory: bool = opt(False, "Record the memory that operations allocate and free.")
    with_stack: bool = opt(False, "Record the lines of Python that called operations.")
    memory_snapshot: bool = opt(False, "Also write the history of the GPU's memory in these steps.")


def _lacks_history(o: Any) -> bool:
    known = ("cuda", "unknown")  # unknown: the command's early checks
    return bool(o.profile and o.profile_params.memory_snapshot and o.device.type not in known)


def _names_no_process(o: Any) -> bool:
    ranks = o.profile_params.ranks if o.profile else None
    return ranks is not None and (not ranks or not all(0 <= rank < o.world_size for rank in ranks))


PROFILE_RULES = (
    when(
        _lacks_history,
        "profile_kwargs: memory_snapshot=True: only the memory of CUDA devices has a history, and this run is on the "
        "{where}. Set profile_memory=True, which traces allocations on every device.",
        example("sft", profile=True, profile_kwargs={"memory_snapshot": True}),
        where=lambda o: o.device.type.upper(),
    ),
)
# Where the number of processes is known.
PROFILED_PROCESSES_RULES = (
    when(
        _names_no_process,
        "profile_kwargs: ranks={ranks}: must be numbers of processes from 0 to {last}, or None for all",
        example("sft", profile=True, profile_kwargs={"ranks": [1]}),
        ranks=lambda o: o.profile_params.ranks,
        last=lambda o: o.world_size - 1,
    ),
)
