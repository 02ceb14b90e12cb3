"""Options of schedules: the hyperparameters of those that transformers does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import opt
from prefrl.options.params import Params, hyperparameters

__all__ = ["CosineWarmRestartsParams", "ExponentialParams", "OneCycleParams", "WeightDecayParams", "WsdParams"]


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
