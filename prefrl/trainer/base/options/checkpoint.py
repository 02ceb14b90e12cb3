"""Options of what checkpoints hold, what is read of them, and where they are uploaded to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsOption, KwargsValue
from prefrl.options.params import Params
from prefrl.options.rules import apply, example, when
from prefrl.options.types import Seconds
from prefrl.printable import without_secrets

__all__ = ["CHECKPOINT_OPTIONS", "CheckpointOptions", "CheckpointParams", "UploadParams", "check_checkpoints"]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


_CHECKPOINT: KwargsOption[CheckpointParams] = KwargsOption(
    "checkpoint_kwargs",
    "What checkpoints hold, and which parts a resumed run reads.",
    switch=None,
    choices={None: CheckpointParams},
)
_UPLOAD: KwargsOption[UploadParams] = KwargsOption(
    "upload_kwargs",
    "Settings of uploads.",
    switch="uploads_checkpoints",
    choices={True: UploadParams},
    off="upload_to=None: nothing is uploaded. Set upload_to.",
)
CHECKPOINT_OPTIONS: tuple[KwargsOption[Any], ...] = (_CHECKPOINT, _UPLOAD)


@dataclass
class CheckpointOptions:
    """Contents of checkpoints, and where they are uploaded."""

    changeable: ClassVar[tuple[str, ...]] = ("checkpoint_kwargs", "upload_to", "upload_kwargs")

    checkpoint_kwargs: KwargsValue = opt(None, _CHECKPOINT.help)
    upload_to: str | None = opt(
        None,
        "Folder or fsspec URL, such as s3://bucket/run, to which checkpoints are uploaded in the background; see "
        "docs/checkpoints.md. resume_from_checkpoint=True reads it if output_dir has none.",
    )
    upload_kwargs: KwargsValue = opt(None, _UPLOAD.help)

    @property
    def checkpoint_params(self) -> CheckpointParams:
        """What checkpoints hold, and what is read of them."""
        return _CHECKPOINT.of(self)

    @property
    def uploads_checkpoints(self) -> bool:
        """Whether there is a place for checkpoints besides `output_dir`."""
        return self.upload_to is not None

    @property
    def upload_params(self) -> UploadParams:
        """Settings of uploads."""
        return _UPLOAD.of(self)


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
