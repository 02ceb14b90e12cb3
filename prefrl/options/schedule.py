"""The course of a training: schedules of its rates, and what lets a run look after itself.

The latter are larger batches, an early end, averages of weights, and a way back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import Example, Rule, default_of, example, mapping_of, opt, plain_value, unset, when
from prefrl.options.names import current_metric
from prefrl.options.params import Params, hyperparameters


@hyperparameters
class OneCycleParams(Params):
    """Hyperparameters of `one_cycle`."""

    max_lr: Annotated[float, Gt(0)] | None = opt(None, "Largest learning rate. The default is learning_rate.")
    pct_start: Annotated[float, Gt(0), Lt(1)] = opt(0.3, "Fraction of the steps in which the rate rises.")
    div_factor: Annotated[float, Ge(1)] = opt(25.0, "The first rate is max_lr / div_factor.")
    final_div_factor: Annotated[float, Ge(1)] = opt(1e4, "The last rate is the first one / final_div_factor.")


@hyperparameters
class ExponentialParams(Params):
    """Hyperparameters of `exponential`."""

    decay_rate: Annotated[float, Gt(0), Le(1)] = opt(0.96, "Factor by which the rate falls over decay_steps steps.")
    decay_steps: Annotated[int, Ge(1)] = opt(10000, "Steps in which the rate falls by decay_rate.")
    staircase: bool = opt(False, "Lower the rate once every decay_steps steps instead of in each step.")


@hyperparameters
class CosineWarmRestartsParams(Params):
    """Hyperparameters of `cosine_warm_restarts`."""

    t_0: Annotated[int, Ge(1)] | None = opt(None, "Number of steps in the first cycle. It must be set.")
    t_mult: Annotated[int, Ge(1)] = opt(1, "Ratio between the lengths of consecutive cycles.")
    eta_min: Annotated[float, Ge(0)] = opt(0.0, "Learning rate at the end of a cycle.")


@hyperparameters
class WsdParams(Params):
    """Hyperparameters of `wsd`: warm-up, stable, decay. The stable phase is what the other two leave."""

    warmup_fraction: Annotated[float, Ge(0), Lt(1)] | None = opt(
        None,
        "Fraction of the steps in which the rate rises. The default is warmup_steps if that is set, and 0.1 "
        "otherwise.",
    )
    decay_fraction: Annotated[float, Gt(0), Le(1)] = opt(
        0.1, "Fraction of the steps in which the rate falls, limited to the steps after the warm-up."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt", "exponential"] = opt("linear", "Shape of the decay.")
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = opt(0.0, "Final rate, as a fraction of learning_rate.")


@hyperparameters
class WeightDecayParams(Params):
    """Hyperparameters of `weight_decay_schedule`."""

    start_factor: Annotated[float, Ge(0)] = opt(0.0, "Factor of weight_decay in the first step.")
    end_factor: Annotated[float, Ge(0)] = opt(1.0, "Factor of weight_decay at the end.")


@hyperparameters
class PlateauParams(Params):
    """Hyperparameters of `reduce_on_plateau`."""

    metric: str = opt(
        "eval_loss", "Name of a logged metric. Names that start with eval_ are of evaluations, all others of training."
    )
    mode: Literal["min", "max"] | None = opt(
        None,
        "Whether the metric is minimized or maximized. By default, a metric whose name ends in loss is minimized; "
        "for others, this must be set.",
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
        hint=True,
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
        lambda o: (
            not takes_warmup(o) or (o.warmup_steps <= 0 and (schedule_of(o) != "wsd" or _warmup_fraction(o) == 0))
        ),
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


_WATCHED = ("loss", "grad_norm", "kl")


@hyperparameters
class GrowthParams(Params):
    """When the batch grows, and by how much."""

    patience: Annotated[int, Ge(1)] = opt(
        5, "Number of consecutive values of the metric without an improvement after which the batch grows."
    )
    rate: Annotated[float, Gt(1)] = opt(
        2.0, "Factor by which the rows of a step grow each time, rounded up to a multiple of the initial number."
    )
    eval_metric: str = opt(
        "loss", "Name of the logged metric that has to improve. Lower is better if the name ends in loss."
    )
    eval_split: Literal["training", "validation"] = opt(
        "training",
        "Where the metric is read: in each training log ('training'), or in evaluations, where it is named without "
        "the prefix eval_ ('validation').",
    )

    @property
    def key(self) -> str:
        """The metric's name in the logs."""
        name = current_metric(self.eval_metric)
        return name if self.eval_split == "training" else f"eval_{name}"


@hyperparameters
class EarlyStoppingParams(Params):
    """What counts as an improvement."""

    threshold: Annotated[float, Ge(0)] = opt(0.0, "Minimum improvement of the metric that counts.")


@hyperparameters
class SoupParams(Params):
    """What goes into a soup."""

    top_k: Annotated[int, Ge(2)] = opt(5, "Number of checkpoints to average or try: those with the best metric.")


@hyperparameters
class SpikeParams(Params):
    """What a spike is, and what happens after one."""

    threshold: Annotated[float, Gt(0)] = opt(
        10.0,
        "How far above the median of the last 100 steps a value must be, in units of 1.4826 times their median "
        "absolute deviation; at least 10 steps must be known.",
    )
    metrics: list[str] | None = opt(
        None,
        "Metrics to watch: 'loss', 'grad_norm' or 'kl'. By default, all that there are; but in online trainers not "
        "the loss, which is 0 up to rounding in an on-policy step.",
    )
    learning_rate_factor: Annotated[float, Gt(0), Le(1)] = opt(
        0.5, "Factor that multiplies the learning rate at each rollback."
    )
    max_rollbacks: Annotated[int, Ge(1)] = opt(
        3, "Maximum number of rollbacks to the same checkpoint; after that, steps with a spike are skipped."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.metrics is not None and not (p.metrics and {*p.metrics} <= {*_WATCHED}),
            f"metrics={{metrics!r}}: must be one or several of {', '.join(map(repr, _WATCHED))}",
            example("sft", on_spike="rollback", spike_kwargs={"metrics": ["los"]}),
        ),
    )


def name_best_metric(config: Any) -> None:
    """Name the metric that checkpoints are chosen by as it is logged; HuggingFace would name the loss if none is."""
    chooses = config.load_best_model_at_end or config.save_strategy == "best" or config.model_soup is not None
    chooses = chooses or config.early_stopping_patience is not None
    if chooses and config.metric_for_best_model is None:
        config.metric_for_best_model = config.best_metric
    if isinstance(config.metric_for_best_model, str):
        config.metric_for_best_model = current_metric(config.metric_for_best_model)


def _evaluates(o: Any) -> bool:
    return str(plain_value(o.eval_strategy)) != "no"


def _interval(o: Any, what: str) -> float:
    is_epochs = plain_value(getattr(o, f"{what}_strategy")) == "epoch"
    return float(getattr(o, f"{what}_epochs" if is_epochs else f"{what}_steps") or 1)


def _checkpoints_per_evaluation(o: Any) -> float:
    return _interval(o, "save") / _interval(o, "eval")


def _lacks_evaluations_of_soup(o: Any) -> bool:
    """Whether checkpoints are saved at the intervals of evaluations, but not at each that an evaluation needs."""
    saves, ratio = plain_value(o.save_strategy), _checkpoints_per_evaluation(o)
    return saves == plain_value(o.eval_strategy) and abs(ratio - round(ratio)) > 1e-6


def _metric_of_average(o: Any) -> str | None:
    """The metric that checkpoints are chosen by, if it is one of the moving average."""
    metric = str(o.metric_for_best_model)
    return metric if o.ema_decay is not None and metric.removeprefix("eval_").startswith("ema_") else None


def _compares(name: str, example: Example) -> Rule:
    return when(
        lambda o: getattr(o, name) is not None and not _evaluates(o),
        f"{name}={{{name}!r}} with eval_strategy='no': it compares evaluations. Set eval_strategy and eval_steps, and "
        "give the trainer an eval_dataset.",
        example,
    )


def _chooses(name: str, example: Example) -> Rule:
    """Checkpoints are not chosen by the moving average: they hold the weights that are trained."""
    return when(
        lambda o: _metric_of_average(o) if getattr(o, name) else None,
        f"{name}={{{name}!r}} with metric_for_best_model={{found!r}}: checkpoints are chosen by the trained weights, "
        "not by their average. Set metric_for_best_model={other!r}.",
        example,
        other=lambda o: str(_metric_of_average(o)).replace("ema_", ""),
    )


AUTOPILOT_RULES = (
    _compares("early_stopping_patience", example("sft", early_stopping_patience=2)),
    _compares("model_soup", example("sft", model_soup="uniform")),
    *unset(
        {"model_soup": "uniform", "on_spike": "rollback"},
        lambda o: o.save_strategy == "no",
        "save_strategy='no': it needs checkpoints. Set save_strategy.",
        example("sft", save_strategy="no", eval_strategy="epoch"),
    ),
    when(
        lambda o: o.model_soup is not None and o.save_total_limit == 1,
        "model_soup={model_soup!r} with save_total_limit=1: there is one checkpoint, and nothing to average. Set "
        "save_total_limit to None or at least 2.",
        example("sft", model_soup="uniform", eval_strategy="epoch", save_total_limit=1),
    ),
    when(
        lambda o: (
            o.model_soup is not None and plain_value(o.save_strategy) not in (plain_value(o.eval_strategy), "best")
        ),
        "model_soup={model_soup!r} with save_strategy={save_strategy!r} and eval_strategy={eval_strategy!r}: each "
        "checkpoint needs an evaluation. Set both to the same value.",
        example("sft", model_soup="uniform", eval_strategy="epoch"),
    ),
    when(
        lambda o: o.model_soup is not None and _lacks_evaluations_of_soup(o),
        "model_soup={model_soup!r} with {save_strategy} between checkpoints and evaluations whose ratio is {ratio:g}: "
        "each checkpoint needs an evaluation. Make save_steps a multiple of eval_steps, or save_epochs of "
        "eval_epochs.",
        example("sft", model_soup="uniform", eval_strategy="steps", eval_steps=2, save_steps=3),
        ratio=_checkpoints_per_evaluation,
    ),
    when(
        lambda o: o.on_spike == "rollback" and o.save_only_model,
        "on_spike='rollback' with save_only_model=True: training cannot continue from a model alone. Set "
        "save_only_model=False.",
        example("sft", on_spike="rollback", save_only_model=True),
    ),
    when(
        lambda o: (
            o.increase_batch_size_on_plateau > 0 and o.growth_params.eval_split == "validation" and not _evaluates(o)
        ),
        "increase_batch_size_kwargs: eval_split='validation' with eval_strategy='no': there are no evaluations. Set "
        "eval_strategy, or eval_split='training'.",
        example("sft", increase_batch_size_on_plateau=1, increase_batch_size_kwargs={"eval_split": "validation"}),
    ),
    _chooses(
        "load_best_model_at_end",
        example(
            "sft",
            load_best_model_at_end=True,
            eval_strategy="steps",
            eval_steps=500,
            ema_decay=0.9,
            metric_for_best_model="eval_ema_loss",
        ),
    ),
    _chooses(
        "model_soup",
        example(
            "sft",
            model_soup="uniform",
            eval_strategy="steps",
            eval_steps=500,
            ema_decay=0.9,
            metric_for_best_model="ema_loss",
        ),
    ),
    when(
        lambda o: o.ema_decay is not None and str(plain_value(o.optim)).startswith("schedule_free"),
        "ema_decay={ema_decay} with optim={optim!r}: this optimizer averages the weights itself. Leave ema_decay "
        "None, or choose another optimizer.",
        example("sft", ema_decay=0.9, optim="schedule_free_adamw"),
    ),
)
