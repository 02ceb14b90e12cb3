"""Coefficients of the loss that adapt to the quantity they control, from step to step or batch to batch.

Their states are floats. Python's `json` writes them in the shortest form that is read back as the same number, so a
resumed run is bitwise identical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prefrl.errors import ConfigError
from prefrl.options.policy import EntropyParams

__all__ = [
    "AdaptiveEntropy",
    "AdaptiveKL",
]

_LARGEST_ERROR = 0.2


class AdaptiveKL:
    """The weight of a KL term: it rises while the divergence is above its target and falls while it is below.

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)

    after n completions with a mean divergence of `kl`.

    Args:
        value: The initial weight, above 0, because a product that starts at 0 stays there.
        target: Target divergence in nats, above 0; per token or per completion, like the `kl` of `update`.
        horizon: Number of completions over which the weight changes by at most about a factor of exp(0.2).

    Raises:
        ConfigError: A number is not positive.

    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        for name, number in (("value", value), ("target", target), ("horizon", horizon)):
            if not 0 < number < math.inf:
                raise ConfigError(f"{name}={number} of an adaptive KL weight: needs to be positive.")
        self._value = float(value)
        self._target = target
        self._horizon = horizon

    @property
    def value(self) -> float:
        """The weight for the next loss."""
        return self._value

    def update(self, kl: float, num_completions: int) -> None:
        """Adapt the weight to the mean divergence of `num_completions` completions, over all ranks.

        Raises:
            ConfigError: There are so many completions that the weight could become 0 or negative.
            ValueError: `kl` is NaN.
        """
        if math.isnan(kl):
            raise ValueError("kl=nan: the KL weight cannot adapt to it. Update it only after steps that have tokens.")
        if _LARGEST_ERROR * num_completions >= self._horizon:
            raise ConfigError(
                f"horizon={self._horizon} of an adaptive KL weight: needs to be above {_LARGEST_ERROR} times the "
                f"{num_completions} completions of an update, or the weight could become 0. Raise it."
            )
        error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._value *= 1 + error * num_completions / self._horizon

    def state_dict(self) -> dict[str, float]:
        """What `update` changes."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._value = state["value"]


class AdaptiveEntropy:
    """The weight of an entropy bonus that keeps the policy's entropy from falling below a target.

    After each step the coefficient changes by `delta`: up if the entropy was at most `target`, otherwise down, within
    `min` .. `max`. The next step applies it only if the entropy was at most `target`, so the bonus never
    pushes the entropy above the target. Before the first update there is no bonus.

    Args:
        coef: The initial coefficient.
        params: Bounds and change of the coefficient, and the target.

    Raises:
        ConfigError: The bounds exclude the coefficient.

    Source: He et al. 2025 (Skywork-OR1), arXiv 2505.22312 (adaptive entropy control); TRL, `use_adaptive_entropy`
    """

    def __init__(self, coef: float, params: EntropyParams) -> None:
        if not params.min <= coef <= params.max:
            raise ConfigError(f"coef={coef} of an adaptive entropy bonus: must be in {params.min} .. {params.max}.")
        self._coef = float(coef)
        self._params = params
        self._entropy: float | None = None

    @property
    def coef(self) -> float:
        """The coefficient, whether or not it is applied."""
        return self._coef

    @property
    def value(self) -> float:
        """The weight for the next loss: the coefficient, or 0 while the entropy is above its target or unknown."""
        return self._coef if self._entropy is not None and self._entropy <= self._params.target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy of a step's tokens, over all ranks.

        Raises:
            ValueError: `entropy` is NaN.
        """
        if math.isnan(entropy):
            raise ValueError("entropy=nan: the bonus cannot adapt to it. Update it only after steps that have tokens.")
        params = self._params
        step = params.delta if entropy <= params.target else -params.delta
        self._coef = min(max(self._coef + step, params.min), params.max)
        self._entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """What `update` changes."""
        return {"coef": self._coef} | ({} if self._entropy is None else {"entropy": self._entropy})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._coef = state["coef"]
        self._entropy = state.get("entropy")
