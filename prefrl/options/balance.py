"""The methods that weight several rewards or losses during training: their hyperparameters, and rules."""

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
# For several losses.
BALANCE_RULES = (
    when(
        lambda o: o.loss_balance is not None and len(o.weighted_losses) < 2,
        "loss_balance={loss_balance!r} has no effect with one loss. List several in loss_type, or set rpo_alpha.",
        example("dpo", loss_balance="nash"),
    ),
    when(
        lambda o: o.loss_balance is not None and min(o.loss_weights or [1.0]) < 0,
        "loss_weights={loss_weights}: loss_balance={loss_balance!r} needs weights >= 0.",
        example("dpo", loss_balance="nash", loss_type=["sigmoid", "sft"], loss_weights=[1.0, -1.0]),
    ),
    when(
        lambda o: (
            [name for name in o.loss_type if o.pair_losses[name].is_batch_loss] if o.loss_balance is not None else None
        ),
        "loss_balance={loss_balance!r} with loss_type={found}: these losses sort the batch, so a pair has no loss of "
        "its own. Remove them, or loss_balance.",
        example("dpo", loss_balance="nash", loss_type=["sigmoid", "aot"]),
    ),
    when(
        lambda o: o.loss_balance is not None and o.use_weighting,
        "loss_balance={loss_balance!r} with use_weighting=True: losses are compared without the weights of pairs. Use "
        "one of them.",
        example("dpo", loss_balance="nash", loss_type=["sigmoid", "sft"], use_weighting=True),
    ),
)
