"""Options of HuggingFace's schedules, which it checks only when training begins, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_optimization"]


def check_optimization(config: TrainingArguments) -> None:
    """Reject arguments of the schedule that are missing, unknown or without effect.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    _check_schedule(config)


def _check_schedule(config: TrainingArguments) -> None:
    name, arguments = str(SchedulerType(config.lr_scheduler_type).value), config.lr_scheduler_kwargs
    if name.startswith("constant"):
        check_no_effect(
            name="lr_scheduler_kwargs",
            value=arguments or None,
            unset=None,
            because=f"lr_scheduler_type={name!r} has no arguments",
            remedy="Remove it, or choose another schedule.",
        )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=10, scheduler_specific_kwargs=arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={arguments!r}: {error}. Set lr_scheduler_kwargs to "
            "what transformers.optimization says of this schedule."
        ) from error
