"""Options of RLOO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from prefrl.options.fields import opt
from prefrl.options.policy import ImportanceLevel, LossType
from prefrl.options.policy_rules import RLOO_RULES
from prefrl.options.rules import apply
from prefrl.options.types import NumSamples
from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
from prefrl.trainer.online.policy_options import KLEstimate

__all__ = ["RLOOConfig"]


@dataclass
class RLOOConfig(PolicyGradientConfig):
    """Shared options with other defaults in `RLOOTrainer`."""

    num_generations: NumSamples = opt(2, "Completions per prompt, at least 2.")
    beta: Annotated[float, Ge(0)] = opt(0.05, "Weight of the KL term; 0: no KL term and no reference model.")
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or, summed over a completion, subtracted from its reward."
    )
    loss_type: LossType = opt(
        "grpo", "The loss and how it is averaged; grpo: the clipped surrogate, mean over sequences."
    )
    importance_sampling_level: ImportanceLevel = opt(
        "sequence_sum", "Level of the ratio; sequence_sum: the ratio of the probabilities of whole completions."
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        apply(self, RLOO_RULES)
        super().validate()

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return "rloo"
