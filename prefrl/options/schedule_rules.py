"""Which options of schedules exclude each other.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from prefrl.options.fields import default_of, mapping_of, plain_value
from prefrl.options.rules import example, unset, when

__all__ = [
    "METRIC_SCHEDULE_RULES",
    "PLATEAU_RULES",
    "SCHEDULE_RULES",
    "WARMUP_RULES",
    "WARMUP_EVALUATIONS_RULES",
    "own_options",
    "schedule_of",
    "takes_warmup",
]

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


def schedule_of(o: Any) -> str:
    """The name of the schedule."""
    return str(plain_value(o.lr_scheduler_type))


def takes_warmup(o: Any) -> bool:
    """Whether the schedule reads `warmup_steps`."""
    return schedule_of(o) not in _WITHOUT_WARMUP


def own_options(o: Any) -> list[str]:
    """The options that are set and that only prefrl's scheduler reads."""
    defaults = {field.name: field for field in dataclasses.fields(o)}
    return [option for option in _OPTIONS if getattr(o, option) != default_of(defaults[option])]


def _own_of_metric(o: Any) -> str | None:
    """An option of prefrl's scheduler, with a schedule that only follows a metric."""
    options = own_options(o) if schedule_of(o) in _OF_METRICS else []
    return f"{options[0]}={getattr(o, options[0])!r}" if options else None


def _warmup_fraction(o: Any) -> Any:
    return mapping_of(o, "lr_scheduler_kwargs").get("warmup_fraction") if schedule_of(o) == "wsd" else None


def _has_warmup(o: Any) -> bool:
    return takes_warmup(o) and (o.warmup_steps > 0 or (schedule_of(o) == "wsd" and _warmup_fraction(o) != 0))


def _other_warmup(o: Any) -> str | None:
    """A key of the schedule that describes its warm-up."""
    keys = mapping_of(o, "lr_scheduler_kwargs")
    return next((key for key in ("warmup_type", "warmup_lr_rate") if key in keys), None)


SCHEDULE_RULES = (
    when(
        lambda o: schedule_of(o).startswith("constant") and mapping_of(o, "lr_scheduler_kwargs"),
        "lr_scheduler_kwargs={lr_scheduler_kwargs!r} has no effect because lr_scheduler_type={lr_scheduler_type!r} "
        "has no arguments. Remove it, or choose another schedule.",
        example("sft", lr_scheduler_type="constant", lr_scheduler_kwargs={"a": 1}),
    ),
    when(
        lambda o: (
            schedule_of(o) == "inverse_sqrt"
            and o.warmup_steps == 0
            and not mapping_of(o, "lr_scheduler_kwargs").get("timescale")
        ),
        "lr_scheduler_type='inverse_sqrt' with warmup_steps=0: transformers then falls back to a timescale of 10000 "
        "steps, in which the learning rate hardly changes. Set warmup_steps, which is also the timescale, or "
        "lr_scheduler_kwargs={{'timescale': ...}}.",
        example("sft", lr_scheduler_type="inverse_sqrt"),
    ),
    when(
        lambda o: schedule_of(o) == "one_cycle" and o.warmup_steps,
        "warmup_steps={warmup_steps} with lr_scheduler_type='one_cycle', which has its own warm-up. Set "
        "lr_scheduler_kwargs={{'pct_start': ...}} instead.",
        example("sft", lr_scheduler_type="one_cycle", warmup_steps=3),
    ),
    when(
        lambda o: o.weight_decay_schedule != "constant" and o.weight_decay == 0,
        "weight_decay_schedule={weight_decay_schedule!r} has no effect because weight_decay=0. Set weight_decay, "
        "which the factors of the schedule multiply.",
        example("sft", weight_decay_schedule="linear"),
    ),
    *unset(
        {"lr_decay_steps": 3},
        lambda o: schedule_of(o) in ("constant", "constant_with_warmup") and o.weight_decay_schedule == "constant",
        "lr_scheduler_type={lr_scheduler_type!r} has no end. Choose another schedule.",
        example("sft", lr_scheduler_type="constant"),
    ),
)
METRIC_SCHEDULE_RULES = (
    when(
        _own_of_metric,
        "{found} with lr_scheduler_type={lr_scheduler_type!r}, which only follows a metric. Choose a schedule, such "
        "as 'constant_with_warmup', and set reduce_on_plateau.",
        example("sft", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", lr_decay_steps=3),
    ),
)
WARMUP_EVALUATIONS_RULES = (
    when(
        lambda o: o.warmup_evaluations and (plain_value(o.eval_strategy) != "steps" or o.eval_steps < 1),
        "warmup_evaluations={warmup_evaluations} with eval_strategy={eval_strategy!r}, eval_steps={eval_steps}: needs "
        "evaluations at an interval in steps. Set eval_strategy='steps' and eval_steps of at least 1, or set "
        "warmup_steps instead.",
        example("sft", warmup_evaluations=2),
    ),
    when(
        lambda o: o.warmup_evaluations and o.warmup_steps not in (0, o.warmup_evaluations * o.eval_steps),
        "warmup_evaluations={warmup_evaluations} with warmup_steps={warmup_steps}: both set the length of the "
        "warm-up. Set only one of them.",
        example("sft", warmup_evaluations=2, eval_strategy="steps", eval_steps=3, warmup_steps=5),
    ),
)
WARMUP_RULES = (
    when(
        lambda o: o.warmup_steps and _warmup_fraction(o) is not None,
        "warmup_steps={warmup_steps} with lr_scheduler_kwargs={lr_scheduler_kwargs!r}: warmup_fraction also sets the "
        "length of the warm-up. Set only one of them.",
        example("sft", lr_scheduler_type="wsd", warmup_steps=5, lr_scheduler_kwargs={"warmup_fraction": 0.2}),
    ),
    *unset(
        {"warmup_start_factor": 0.5, "warmup_evaluations": 2},
        lambda o: not _has_warmup(o),
        "lr_scheduler_type={lr_scheduler_type!r} with warmup_steps={warmup_steps} has no such warm-up. Set "
        "warmup_steps, and a schedule with a warm-up, such as 'constant_with_warmup'.",
        example("sft", lr_scheduler_type="constant", eval_strategy="steps", eval_steps=3),
    ),
    when(
        lambda o: _other_warmup(o) if o.warmup_start_factor is not None else None,
        "warmup_start_factor={warmup_start_factor} with lr_scheduler_kwargs={lr_scheduler_kwargs!r}: {found!r} "
        "describes another warm-up. Remove one of them.",
        example(
            "sft",
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": 5, "warmup_type": "cosine"},
            warmup_steps=5,
            warmup_start_factor=0.5,
        ),
    ),
)
# With reduce_on_plateau.
PLATEAU_RULES = (
    when(
        lambda o: o.plateau_params.mode is None and not o.plateau_params.metric.endswith("loss"),
        "reduce_on_plateau_kwargs: metric={plateau_params.metric!r}: should it rise or fall? Set the key mode to "
        "'max' or 'min'.",
        example("sft", reduce_on_plateau=1, reduce_on_plateau_kwargs={"metric": "reward"}),
    ),
    when(
        lambda o: (
            not o.plateau_params.metric.startswith("eval_")
            and (plain_value(o.logging_strategy) != "steps" or o.logging_steps != 1)
        ),
        "reduce_on_plateau_kwargs: metric={plateau_params.metric!r} with logging_strategy={logging_strategy!r}, "
        "logging_steps={logging_steps:g}: a metric of training must be logged in every step, so that a resumed run "
        "sees the same values. Set logging_steps=1, and the key window to the number of steps to average over; or "
        "choose a metric of evaluations, such as 'eval_loss'.",
        example("sft", reduce_on_plateau=1, logging_steps=2, reduce_on_plateau_kwargs={"metric": "loss"}),
    ),
    when(
        lambda o: o.plateau_params.metric.startswith("eval_") and plain_value(o.eval_strategy) == "no",
        "reduce_on_plateau_kwargs: metric={plateau_params.metric!r} with eval_strategy='no': there are no "
        "evaluations. Set eval_strategy and eval_steps, or choose a metric of training.",
        example("sft", reduce_on_plateau=1),
    ),
)
