"""Options for balancing several rewards with weights that adapt during training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.losses.advantage.balance import REWARD_BALANCES
from prefrl.trainer.base.options import opt
from prefrl.trainer.online.rollout_options import refuse_unless

__all__ = ["BalanceOptions"]


@dataclass
class BalanceOptions:
    """How several rewards are balanced; see docs/losses.md."""

    reward_balance: Literal["fixed", "log_transform", "uncertainty", "gradnorm", "famo", "nash", "pareto"] | None = (
        opt(
            None,
            "How to weight the advantages of each reward during training; reward_weights are the preferences. None: "
            "advantages of the weighted sum of rewards.",
        )
    )
    uncertainty_rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "uncertainty: step size of the log-scales.")
    gradnorm_alpha: Annotated[float, Ge(0)] = opt(1.5, "gradnorm: how strongly rewards that lag behind are favored.")
    gradnorm_rate: Annotated[float, Gt(0), Le(1)] = opt(0.1, "gradnorm: step size of the log-weights.")
    famo_rate: Annotated[float, Gt(0)] = opt(1.0, "famo: step size of the logits.")
    famo_decay: Annotated[float, Ge(0)] = opt(0.001, "famo: decay of the logits.")
    pareto_smoothing: Annotated[float, Gt(0)] = opt(0.5, "pareto: smoothing of the maximum; smaller is closer to it.")

    @property
    def balance_hyperparameters(self) -> dict[str, float]:
        """The hyperparameters of the chosen method, by name."""
        assert self.reward_balance is not None
        return {name: getattr(self, name) for name in REWARD_BALANCES[self.reward_balance].hyperparameters}

    def validate_balance(self) -> None:
        """Reject options of other methods, and invalid combinations of values.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        read = set() if self.reward_balance is None else set(self.balance_hyperparameters)
        for field in fields(BalanceOptions):
            if field.name != "reward_balance" and field.name not in read:
                users = [name for name, row in REWARD_BALANCES.items() if field.name in row.hyperparameters]
                refuse_unless(self, field.name, switch="reward_balance", remedy=f"Set reward_balance={users[0]!r}.")
        if self.famo_rate * self.famo_decay >= 1:
            raise ConfigError(f"famo_rate={self.famo_rate} * famo_decay={self.famo_decay}: must be below 1")
