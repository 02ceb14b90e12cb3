"""Options of HuggingFace's optimizers and schedules, which it checks only when training begins, or not at all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_optimization"]

# The optimizers that read optim_target_modules have one of these in their names.
_LAYERWISE = ("galore", "apollo")


def check_optimization(config: TrainingArguments) -> None:
    """Reject arguments of optimizer and schedule that are missing, unknown or without effect.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    _check_schedule(config)
    _check_optimizer(config)


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


def _check_optimizer(config: TrainingArguments) -> None:
    name = str(OptimizerNames(config.optim).value)
    if not any(word in name for word in _LAYERWISE):
        check_no_effect(
            name="optim_target_modules",
            value=config.optim_target_modules,
            unset=None,
            because=f"optim={name!r} treats all weights alike",
            remedy="Leave it None; freeze leaves weights out.",
        )
    parts = config.optim_args.replace(" ", "").split(",") if config.optim_args else []
    read = _arguments_of(config, parts) if parts else None
    for part in parts:
        if read is not None and _arguments_of(config, [other for other in parts if other != part]) == read:
            raise ConfigError(
                f"optim_args={config.optim_args!r}: {part.partition('=')[0]!r} has no effect because transformers "
                f"does not pass it to optim={name!r}. Remove it, or give the trainer your own optimizer: "
                "optimizers=(optimizer, None)."
            )


def _arguments_of(config: TrainingArguments, parts: list[str]) -> Any:
    """What HuggingFace passes to the optimizer; None if that cannot be known before the model or package is there."""
    from transformers import Trainer  # takes seconds

    other = copy.copy(config)
    other.optim_args = ",".join(parts) or None
    try:
        return Trainer.get_optimizer_cls_and_kwargs(other)
    except (ImportError, ValueError):
        return None
