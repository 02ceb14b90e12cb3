"""Hyperparameters of the methods that weight several rewards or losses during training."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import Rule, example, opt, when
from prefrl.options.params import Params, hyperparameters


@hyperparameters
class UncertaintyParams(Params):
    """Hyperparameters of `uncertainty`."""

    rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "Step size of the log-scales.")


@hyperparameters
class GradnormParams(Params):
    """Hyperparameters of `gradnorm`."""

    alpha: Annotated[float, Ge(0)] = opt(1.5, "How strongly rewards or losses that lag behind are favored.")
    rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "Step size of the log-weights.")


@hyperparameters
class FamoParams(Params):
    """Hyperparameters of `famo`."""

    rate: Annotated[float, Gt(0)] = opt(1.0, "Step size of the logits.")
    decay: Annotated[float, Ge(0)] = opt(0.001, "Decay of the logits; rate * decay must be below 1.")

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.rate * p.decay >= 1,
            "rate={rate} * decay={decay}: must be below 1. Lower one of them.",
            example("grpo", reward_balance="famo", balance_kwargs={"decay": 1.0}),
        ),
    )


@hyperparameters
class ParetoParams(Params):
    """Hyperparameters of `pareto`."""

    smoothing: Annotated[float, Gt(0)] = opt(0.5, "Smoothing of the maximum; smaller is closer to it.")


# The hyperparameters of each method of `reward_balance` and `loss_balance`.
BALANCE_PARAMS: dict[str, type[Params]] = {
    "fixed": Params,
    "log_transform": Params,
    "uncertainty": UncertaintyParams,
    "gradnorm": GradnormParams,
    "famo": FamoParams,
    "nash": Params,
    "pareto": ParetoParams,
}
