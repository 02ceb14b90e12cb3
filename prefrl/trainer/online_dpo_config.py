"""Options of online DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from prefrl.options.fields import opt
from prefrl.options.policy_rules import PAIRS_RULES
from prefrl.options.rules import apply
from prefrl.options.types import NumSamples
from prefrl.trainer.base.options.reference import REFERENCE_RULES, ReferenceOptions
from prefrl.trainer.online.config import OnlineConfig

__all__ = ["OnlineDPOConfig"]


@dataclass
class OnlineDPOConfig(ReferenceOptions, OnlineConfig):
    """Options of `OnlineDPOTrainer`, and shared options with other defaults."""

    loss_type: Literal["sigmoid", "ipo"] = opt("sigmoid", "DPO's loss, or IPO's.")
    beta: Annotated[float, Gt(0)] = opt(
        0.1, "Implicit rewards are beta * log(policy / reference); a larger beta keeps the policy closer."
    )
    num_generations: NumSamples = opt(
        2, "Completions per prompt, at least 2: the best and the worst of them form a pair."
    )

    @property
    def rows_per_micro_batch(self) -> int:
        """All completions of `per_device_train_batch_size` prompts, as in TRL."""
        return super().rows_per_micro_batch * self.num_generations

    @property
    def prompts_per_evaluation_batch(self) -> int:
        """`per_device_eval_batch_size` counts prompts, too."""
        return int(self.per_device_eval_batch_size)

    @property
    def corrects_sampling(self) -> bool:
        """False: pairs are trained on like those of a dataset, whichever policy sampled them."""
        return False

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        apply(self, PAIRS_RULES)
        super().validate()
        apply(self, REFERENCE_RULES)
