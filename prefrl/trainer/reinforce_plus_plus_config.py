"""Options of REINFORCE++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import opt
from prefrl.options.policy_rules import REINFORCE_PLUS_PLUS_RULES
from prefrl.options.rules import apply
from prefrl.options.types import NumSamples
from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
from prefrl.trainer.online.policy_options import KLEstimate

__all__ = ["ReinforcePlusPlusConfig"]


@dataclass
class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Options of `ReinforcePlusPlusTrainer`, and shared options with other defaults."""

    advantage_estimator: Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"] = opt(
        "reinforce_plus_plus",
        "reinforce_plus_plus: discounted sum of the rewards from a token on. reinforce_plus_plus_baseline: the reward "
        "minus the mean reward of the prompt's completions.",
    )
    gamma: Annotated[float, Gt(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")
    num_generations: NumSamples = opt(1, "Completions per prompt; a baseline needs more than 1.")
    normalize_advantages: bool = opt(
        True, "Normalize the advantages of all tokens of a generation batch to mean 0 and standard deviation 1."
    )
    beta: Annotated[float, Ge(0)] = opt(0.01, "Weight of the KL term; 0: no KL term and no reference model.")
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or subtracted from the reward."
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        apply(self, REINFORCE_PLUS_PLUS_RULES)
        super().validate()

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return self.advantage_estimator
