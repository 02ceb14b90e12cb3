"""Options for balancing several rewards with weights that adapt during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefrl.losses.advantage.balance import REWARD_BALANCES
from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsOption, KwargsValue
from prefrl.options.params import Params

__all__ = ["BALANCE", "BalanceOptions"]

BALANCE: KwargsOption[Params] = KwargsOption(
    "balance_kwargs",
    "Hyperparameters of reward_balance.",
    switch="reward_balance",
    choices={name: row.params for name, row in REWARD_BALANCES.items()},
)


@dataclass
class BalanceOptions:
    """Balancing of several rewards; see docs/losses.md."""

    reward_balance: Literal["fixed", "log_transform", "uncertainty", "gradnorm", "famo", "nash", "pareto"] | None = (
        opt(
            None,
            "How to weight the advantages of each reward during training; reward_weights are the preferences. None: "
            "advantages of the weighted sum of rewards.",
        )
    )
    balance_kwargs: KwargsValue = opt(None, BALANCE.help)

    @property
    def balance_params(self) -> Params:
        """The hyperparameters of the chosen method."""
        return BALANCE.of(self)
