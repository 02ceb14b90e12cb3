"""Schedules of the learning rate and the weight decay: their hyperparameters, and what they can be combined with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import default_of, example, mapping_of, opt, plain_value, unset, when
from prefrl.options.params import Params, hyperparameters


@hyperparameters
class OneCycleParams(Params):
    """Of `one_cycle`."""

    max_lr: Annotated[float, Gt(0)] | None = opt(None, "Largest learning rate; None: learning_rate.")
    pct_start: Annotated[float, Gt(0), Lt(1)] = opt(0.3, "Fraction of the steps in which the rate rises.")
    div_factor: Annotated[float, Ge(1)] = opt(25.0, "The first rate is max_lr / div_factor.")
    final_div_factor: Annotated[float, Ge(1)] = opt(1e4, "The last rate is the first one / final_div_factor.")


@hyperparameters
class ExponentialParams(Params):
    """Of `exponential`."""

    decay_rate: Annotated[float, Gt(0), Le(1)] = opt(0.96, "Factor by which the rate falls over decay_steps steps.")
    decay_steps: Annotated[int, Ge(1)] = opt(10000, "Steps in which the rate falls by decay_rate.")
    staircase: bool = opt(False, "Lower the rate once every decay_steps steps instead of in each step.")


@hyperparameters
class CosineWarmRestartsParams(Params):
    """Of `cosine_warm_restarts`."""

    t_0: Annotated[int, Ge(1)] | None = opt(None, "Steps of the first cycle. Must be set.")
    t_mult: Annotated[int, Ge(1)] = opt(1, "Ratio between the lengths of consecutive cycles.")
    eta_min: Annotated[float, Ge(0)] = opt(0.0, "Learning rate at the end of a cycle.")


@hyperparameters
class WsdParams(Params):
    """Of `wsd`: warm-up, stable, decay. The stable phase is what the other two leave."""

    warmup_fraction: Annotated[float, Ge(0), Lt(1)] | None = opt(
        None, "Fraction of the steps in which the rate rises; None: warmup_steps if that is set, otherwise 0.1."
    )
    decay_fraction: Annotated[float, Gt(0), Le(1)] = opt(
        0.1, "Fraction of the steps in which the rate falls, limited to the steps after the warm-up."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt", "exponential"] = opt("linear", "How the rate falls.")
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = opt(0.0, "Final rate, as a fraction of learning_rate.")


@hyperparameters
class WeightDecayParams(Params):
    """Of `weight_decay_schedule`."""

    start_factor: Annotated[float, Ge(0)] = opt(0.0, "Factor of weight_decay in the first step.")
    end_factor: Annotated[float, Ge(0)] = opt(1.0, "Factor of weight_decay at the end.")


@hyperparameters
class PlateauParams(Params):
    """Of `reduce_on_plateau`."""

    metric: str = opt(
        "eval_loss", "Name of a logged metric; names that start with eval_ are from evaluations, others from training."
    )
    mode: Literal["min", "max"] | None = opt(
        None, "Whether the metric is minimized or maximized; None: minimized if its name ends in loss."
    )
    patience: Annotated[int, Ge(0)] = opt(
        10, "Number of consecutive values without an improvement that are tolerated."
    )
    factor: Annotated[float, Gt(0), Lt(1)] = opt(0.1, "Factor by which a reduction multiplies the learning rate.")
    threshold: Annotated[float, Ge(0)] = opt(1e-4, "Minimum improvement that counts, as a fraction of the best value.")
    window: Annotated[int, Ge(1)] = opt(1, "Number of logged values that are averaged into one.")


@dataclass(frozen=True)
class ScheduleFacts:
    """What is known of a schedule that transformers does not have, without its function.

    Args:
        params: Its hyperparameters.
        has_warmup: Whether `warmup_steps` steps precede it; otherwise it begins low itself.
        knows_length: Whether it depends on the number of steps.
    """

    params: type[Params]
    has_warmup: bool = True
    knows_length: bool = True


SCHEDULE_FACTS: dict[str, ScheduleFacts] = {
    "one_cycle": ScheduleFacts(OneCycleParams, has_warmup=False),
    "exponential": ScheduleFacts(ExponentialParams, knows_length=False),
    "cosine_warm_restarts": ScheduleFacts(CosineWarmRestartsParams, knows_length=False),
    "wsd": ScheduleFacts(WsdParams),
}


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
