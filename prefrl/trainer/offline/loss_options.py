"""Checks the options that are hyperparameters of pairwise losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.losses.preference.pairwise import PairLoss
from prefrl.options.fields import check_unset

__all__ = ["check_loss_options"]


def check_loss_options(config: Any, losses: Mapping[str, PairLoss[Any]], chosen: Sequence[str]) -> None:
    """Reject options that no chosen loss reads, and values that a chosen loss does not allow.

    Args:
        config: Has an option for each hyperparameter of the losses.
        losses: The losses that there are to choose from.
        chosen: The names of the chosen ones.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    readers: dict[str, list[str]] = {}
    for loss, row in losses.items():
        for name in row.params.names():
            readers.setdefault(name, []).append(loss)
    for name, names in readers.items():
        if not set(names) & set(chosen):
            because = f"loss_type={config.loss_type!r} does not read it"
            check_unset(config, name, because=because, remedy=f"It goes with {' or '.join(map(repr, names))}.")
    for loss in chosen:
        losses[loss].params.from_options(config)
