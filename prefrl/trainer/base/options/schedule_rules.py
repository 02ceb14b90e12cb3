"""Which options of schedules exclude each other.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset, default_of, mapping_of, plain_value

__all__ = ["check_plateau", "check_schedule_of_metric", "check_warmup", "own_options", "takes_warmup"]

# Of transformers: these follow metrics instead of the step, and these have no warm-up.
_OF_METRICS = ("reduce_lr_on_plateau", "greedy")
_WITHOUT_WARMUP = ("constant", *_OF_METRICS, "one_cycle")
# Those that only prefrl's scheduler reads.
_OPTIONS = (
    "lr_decay_steps",
    "warmup_start_factor",
    "learning_rate_scaling",
    "reduce_on_plateau",
    "weight_decay_schedule",
)


def takes_warmup(schedule: str) -> bool:
    """Whether a schedule reads `warmup_steps`."""
    return schedule not in _WITHOUT_WARMUP


def own_options(config: Any) -> list[str]:
    """The options that are set and that only prefrl's scheduler reads."""
    defaults = {field.name: field for field in dataclasses.fields(config)}
    return [option for option in _OPTIONS if getattr(config, option) != default_of(defaults[option])]


def check_schedule_of_metric(config: Any) -> None:
    """Reject options of prefrl's scheduler with schedules that follow a metric alone.

    Raises:
        ConfigError: Names the option and what to do.
    """
    name, options = plain_value(config.lr_scheduler_type), own_options(config)
    if options and name in _OF_METRICS:
        raise ConfigError(
            f"{options[0]}={getattr(config, options[0])!r} with lr_scheduler_type={name!r}, which only follows a "
            "metric. Choose a schedule, such as 'constant_with_warmup', and set reduce_on_plateau."
        )


def check_warmup(config: Any) -> None:
    """Reject descriptions of a warm-up that there is not, and two of the same.

    Raises:
        ConfigError: Names the options and what to do.
    """
    name, kwargs = plain_value(config.lr_scheduler_type), mapping_of(config, "lr_scheduler_kwargs")
    fraction = kwargs.get("warmup_fraction") if name == "wsd" else None
    if config.warmup_steps and fraction is not None:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} with lr_scheduler_kwargs={kwargs!r}: warmup_fraction also sets the "
            "length of the warm-up. Set only one of them."
        )
    has_one = config.warmup_steps > 0 or (name == "wsd" and fraction != 0)
    if not (takes_warmup(name) and has_one):
        because = f"lr_scheduler_type={name!r} with warmup_steps={config.warmup_steps} has no such warm-up"
        remedy = "Set warmup_steps, and a schedule with a warm-up, such as 'constant_with_warmup'."
        check_unset(config, "warmup_start_factor", "warmup_evaluations", because=because, remedy=remedy)
    shape = next((key for key in ("warmup_type", "warmup_lr_rate") if key in kwargs), None)
    if shape is not None and config.warmup_start_factor is not None:
        raise ConfigError(
            f"warmup_start_factor={config.warmup_start_factor} with lr_scheduler_kwargs={kwargs!r}: {shape!r} "
            "describes another warm-up. Remove one of them."
        )


def check_plateau(config: Any) -> None:
    """Reject metrics of `reduce_on_plateau` that are not logged, or of which it is not known where they should go.

    Raises:
        ConfigError: Names the metric and what to do.
    """
    params = config.plateau_params
    where = f"reduce_on_plateau_kwargs: metric={params.metric!r}"
    if params.mode is None and not params.metric.endswith("loss"):
        raise ConfigError(f"{where}: should it rise or fall? Set the key mode to 'max' or 'min'.")
    logging = plain_value(config.logging_strategy)
    if not params.metric.startswith("eval_"):
        if logging != "steps" or config.logging_steps != 1:
            raise ConfigError(
                f"{where} with logging_strategy={logging!r}, logging_steps={config.logging_steps:g}: a metric of "
                "training must be logged in every step, so that a resumed run sees the same values. Set "
                "logging_steps=1, and the key window to the number of steps to average over; or choose a metric of "
                "evaluations, such as 'eval_loss'."
            )
    elif plain_value(config.eval_strategy) == "no":
        raise ConfigError(
            f"{where} with eval_strategy='no': there are no evaluations. Set eval_strategy and eval_steps, or choose "
            "a metric of training."
        )
