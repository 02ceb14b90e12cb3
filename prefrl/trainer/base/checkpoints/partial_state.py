"""Checkpoints without the optimizer's state, and trainings that resume without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TrainerState

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.trainer.base.scheduler import refresh

if TYPE_CHECKING:
    from prefrl.options.checkpoint import CheckpointParams

__all__ = ["best_beside", "check_parts", "load_schedule", "save_schedule"]


def check_parts(params: CheckpointParams, accelerator: Any, checkpoint: Path | None) -> None:
    """Check that the backend can do what is asked for, and that a checkpoint holds what is to be read of it.

    Args:
        params: Options.
        accelerator: The trainer's accelerator.
        checkpoint: What training resumes from; None: nothing.

    Raises:
        ConfigError: It cannot, it does so anyway, or the checkpoint lacks something.
    """
    for name, value in (("save_optimizer", params.save_optimizer), ("load_optimizer", params.load_optimizer)):
        if not value and not distributed.keeps_optimizer_apart(accelerator):
            raise ConfigError(
                f"checkpoint_kwargs: {name}=False is not supported with ZeRO and FSDP2, which save weights and "
                "optimizer state together. Leave it out; save_only_model=True saves only the model."
            )
    if params.export_weights and not distributed.keeps_checkpoints_partitioned(accelerator):
        raise ConfigError(
            "checkpoint_kwargs: export_weights=True has no effect because this backend, with its current settings, "
            "writes complete weights to every checkpoint. Leave it out."
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
