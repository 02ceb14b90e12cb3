"""Options for balancing several rewards with weights that adapt during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefrl.losses.advantage.balance import REWARD_BALANCES
from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.params import Params

__all__ = ["BalanceOptions"]


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
    balance_kwargs: KwargsValue = kwargs(
        "Hyperparameters of reward_balance.",
        {name: row.params for name, row in REWARD_BALANCES.items()},
        switch="reward_balance",
    )

    balance_params = ParamsOf("balance_kwargs", Params)
