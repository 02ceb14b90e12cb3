"""Options of reward modeling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from prefrl.options.fields import check_no_effect, opt
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
        check_no_effect(
            name="truncation_mode",
            value=self.truncation_mode,
            unset="keep_start",
            because="a part of a response has no label: pairs above max_length cannot be used",
            remedy="Raise max_length, or leave such pairs out with invalid_rows='drop'.",
        )
