"""Checks the options that are hyperparameters of pairwise losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import check_unset

__all__ = ["check_loss_options", "check_pair_losses"]


def check_pair_losses(config: Any, losses: Mapping[str, Any]) -> None:
    """Reject losses of DPO that there are not, and options that a loss cannot be combined with.

    Args:
        config: Options of DPO.
        losses: `PAIR_LOSSES`, or what rows of it say about combinations.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    unknown = [name for name in config.loss_type if name not in losses]
    if unknown or not config.loss_type:
        raise ConfigError(f"loss_type={config.loss_type}: must be one or several of {', '.join(losses)}")
    raw = [name for name in config.loss_type if losses[name].uses_log_ratios]
    if raw and config.f_divergence_type != "reverse_kl":
        raise ConfigError(
            f"f_divergence_type={config.f_divergence_type!r} with loss_type={raw}: these losses use the "
            "log-ratios themselves. Use reverse_kl, or another loss."
        )
    sorting = [name for name in config.loss_type if losses[name].is_batch_loss]
    if sorting and config.use_weighting:
        raise ConfigError(
            f"use_weighting=True with loss_type={sorting}: its values belong to positions in the sorted "
            "batch, not to pairs. Set use_weighting=False."
        )


def check_loss_options(config: Any, losses: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """Reject options that no chosen loss reads, and values that a chosen loss does not allow.

    Args:
        config: Has an option for each hyperparameter of the losses.
        losses: The losses that there are to choose from; each row has `params`.
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
