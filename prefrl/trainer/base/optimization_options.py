"""Options of HuggingFace's optimizers and schedules, which it checks only when training begins, or not at all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers.training_args import OptimizerNames

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from prefrl.trainer.base.schedule_options import ScheduleOptions

__all__ = ["check_optimization"]

# The optimizers that read optim_target_modules have one of these in their names.
_LAYERWISE = ("galore", "apollo")


def check_optimization(config: ScheduleOptions) -> None:
    """Reject arguments of optimizer and schedule that are missing, unknown or without effect.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    config.validate_schedule()
    _check_optimizer(config)


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
