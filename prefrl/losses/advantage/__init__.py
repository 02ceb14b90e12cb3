"""The table of all advantage estimators: those of rows, and those of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prefrl.losses.advantage.estimators import (
    Advantages,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from prefrl.losses.advantage.tokens import gae, optimal_token_baseline, reinforce_plus_plus
from prefrl.options.policy_gradient import ESTIMATOR_FACTS, AdvantageParams

P = TypeVar("P", bound=AdvantageParams)


@dataclass(frozen=True, slots=True)
class AdvantageEstimator(Generic[P]):
    """A row of `ADVANTAGES`: `function(scored, params)` with `ScoredRows` or `ScoredTokens`; see `EstimatorFacts`."""

    function: Callable[[Any, P], Advantages]
    params: type[P]
    level: Literal["row", "token"]
    source: str
    whitened: bool
    needs: frozenset[str]


_FUNCTIONS: dict[str, Callable[[Any, Any], Advantages]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "maxrl": maxrl,
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "optimal_token_baseline": optimal_token_baseline,
}

ADVANTAGES: dict[str, AdvantageEstimator[Any]] = {
    name: AdvantageEstimator(function, **vars(ESTIMATOR_FACTS[name])) for name, function in _FUNCTIONS.items()
}
