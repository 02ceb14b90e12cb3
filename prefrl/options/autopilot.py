"""Options that let a run look after itself: larger batches, an early end, averages of weights, a way back."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import Example, Rule, example, opt, plain_value, unset, when
from prefrl.options.params import Params, hyperparameters

_WATCHED = ("loss", "grad_norm", "kl")


@hyperparameters
class GrowthParams(Params):
    """When the batch grows, and by how much."""

    patience: Annotated[int, Ge(1)] = opt(
        5, "Consecutive values of the metric without an improvement after which the batch grows."
    )
    rate: Annotated[float, Gt(1)] = opt(
        2.0, "Factor by which the rows of a step grow each time, rounded up to a multiple of the initial number."
    )
    eval_metric: str = opt(
        "loss", "Name of the logged metric that has to improve; lower is better if it ends with loss."
    )
    eval_split: Literal["training", "validation"] = opt(
        "training",
        "training: the metric is read from each training log. validation: it is read from evaluations, and is named "
        "without the prefix eval_.",
    )

    @property
    def key(self) -> str:
        """The metric's name in the logs."""
        return self.eval_metric if self.eval_split == "training" else f"eval_{self.eval_metric}"


@hyperparameters
class EarlyStoppingParams(Params):
    """What counts as an improvement."""

    threshold: Annotated[float, Ge(0)] = opt(0.0, "Minimum improvement of the metric that counts.")


@hyperparameters
class SoupParams(Params):
    """What goes into a soup."""

    top_k: Annotated[int, Ge(2)] = opt(5, "Number of checkpoints with the best metric that are averaged or tried.")


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
        "Metrics to watch: loss, grad_norm, and kl if there is one. None: all of them, but in online trainers not "
        "the loss, which is 0 up to rounding in an on-policy step.",
    )
    learning_rate_factor: Annotated[float, Gt(0), Le(1)] = opt(
        0.5, "Factor by which the learning rate is multiplied at each rollback."
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
    """Name the metric that checkpoints are chosen by, if none is named. HuggingFace would name the loss."""
    chooses = config.load_best_model_at_end or config.save_strategy == "best" or config.model_soup is not None
    chooses = chooses or config.early_stopping_patience is not None
    if chooses and config.metric_for_best_model is None:
        config.metric_for_best_model = config.best_metric


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
