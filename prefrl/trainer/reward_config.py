"""Options of reward modeling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from prefrl.options.fields import opt
from prefrl.options.offline_rules import TRUNCATION_SIDE_RULES
from prefrl.options.rules import apply
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["RewardConfig"]


@dataclass
class RewardConfig(OfflineConfig):
    """Options of `RewardTrainer`."""

    adds_tokens: ClassVar[bool] = True

    learning_rate: float = opt(1e-4, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    center_rewards_coefficient: Annotated[float, Gt(0)] | None = opt(
        None, "Weight of (reward of chosen + reward of rejected)^2, which centers rewards on 0; 0.01 is recommended."
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, TRUNCATION_SIDE_RULES)
