"""Policy losses in engines that hand over sequences end to end, without saying where one ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prefrl.errors import ConfigError
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.tokens import TokenLoss
from prefrl.losses.tensors import TokenRows, loss_params, policy_loss, reduction_of

# Their loss of a token depends on this token alone, and the loss of a step is the mean over its tokens.
LOSSES = tuple(
    name
    for name, row in POLICY_LOSSES.items()
    if row.reduction == "token" and row.selection is None and name != "vespo"  # whose ratio is of the whole row
)


def check_loss(engine: str, loss_type: str, hyperparameters: Mapping[str, Any]) -> None:
    """Reject losses that the engine cannot compute.

    Raises:
        ConfigError: The loss needs more than single tokens, or there is no such loss or hyperparameter.
    """
    loss_params(loss_type, "token", {name: value for name, value in hyperparameters.items() if name != "level"})
    if hyperparameters.get("level", "token") != "token":
        raise ConfigError(
            f"level={hyperparameters['level']!r} with {engine}: it packs sequences without their bounds, so "
            "that there is no ratio of a row. Use level='token', or verl or NeMo-RL."
        )
    if loss_type not in LOSSES:
        because = "sums over a row" if reduction_of(loss_type) == "token" else "is not averaged over tokens"
        raise ConfigError(
            f"loss_type={loss_type!r} with {engine}: it {because}, but {engine} packs sequences without their bounds "
            f"and divides by the number of tokens. Allowed are {', '.join(LOSSES)}."
        )


def token_losses(
    loss_type: str,
    mask: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    hyperparameters: Mapping[str, Any],
) -> tuple[TokenRows, TokenLoss]:
    """The tokens as one row, and the loss of each, flat."""
    rows = TokenRows(mask.flatten(), torch.zeros_like(mask.flatten(), dtype=torch.long), 1)
    flat = (logprobs.flatten(), old_logprobs.flatten(), advantages.flatten())
    return rows, policy_loss(loss_type, rows, *flat, **hyperparameters)
