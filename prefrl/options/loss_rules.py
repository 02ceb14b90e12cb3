"""What hyperparameters of losses and advantages must be together.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_range

__all__ = [
    "check_band",
    "check_clip_range",
    "check_decay_of_logits",
    "check_delta",
    "check_exo",
    "check_horizon",
    "check_robust",
    "check_scale",
]


def check_band(params: Any) -> None:
    """The bounds of covariances have to be in ascending order."""
    if params.lb >= params.ub:
        raise ConfigError(f"lb={params.lb}: must be below ub={params.ub}")


def check_delta(params: Any) -> None:
    """Two-sided clipping has to have an effect."""
    high = params.epsilon if params.epsilon_high is None else params.epsilon_high
    if params.delta is not None and params.delta <= 1 + high:
        raise ConfigError(
            f"delta={params.delta}: must be above 1 + epsilon_high = {1 + high}, or the clipping never takes effect"
        )


def check_horizon(params: Any) -> None:
    """The horizon has to have an effect."""
    if params.target is None:
        check_no_effect(
            name="horizon", value=params.horizon, unset=10_000, because="beta is fixed", remedy="Set target."
        )


def check_clip_range(params: Any) -> None:
    """Without 0 in the range of advantages, rows without a reward would have a gradient."""
    check_range(params.clip_range, "clip_range")
    if params.clip_range is not None and not params.clip_range[0] <= 0 <= params.clip_range[1]:
        raise ConfigError(f"clip_range={params.clip_range}: must contain 0, as in [-5, 5]")


def check_scale(params: Any) -> None:
    """The scale of advantages has to have an effect."""
    if params.multi_objective_aggregation == "normalize_then_sum" and params.scale_rewards != "group":
        raise ConfigError(
            f"scale_rewards={params.scale_rewards!r} has no effect with "
            "multi_objective_aggregation='normalize_then_sum', which normalizes by group and then by batch. Use "
            "scale_rewards='group'."
        )


def check_decay_of_logits(params: Any) -> None:
    """The logits of FAMO have to decay."""
    if params.rate * params.decay >= 1:
        raise ConfigError(f"rate={params.rate} * decay={params.decay}: must be below 1. Lower one of them.")


def check_exo(params: Any) -> None:
    """The smoothed label has to have a direction."""
    if params.label_smoothing >= 0.5:
        raise ConfigError(
            f"label_smoothing={params.label_smoothing}: exo_pair needs it below 0.5: its target distribution is "
            "[1 - label_smoothing, label_smoothing]. The paper's value is 1e-3."
        )


def check_robust(params: Any) -> None:
    """The labels have to carry information."""
    if params.label_smoothing == 0.5:
        raise ConfigError(
            "label_smoothing=0.5: robust needs it below 0.5, because it divides by 1 - 2 * label_smoothing."
        )
