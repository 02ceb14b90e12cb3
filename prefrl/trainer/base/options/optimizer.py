"""Options of optimizers: those of HuggingFace, which it checks only when training begins or not at all, and ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.training_args import OptimizerNames

from prefrl.errors import ConfigError
from prefrl.options.optimizers import (
    NAMED_OPTIMIZER_RULES,
    OPTIMIZERS,
    REFUSED,
    UPDATE_RULES,
    check_not_refused,
    check_rates,
)
from prefrl.options.rules import apply
from prefrl.options.suggest import check_known
from prefrl.trainer.optimizers import added_keys, check_made

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["KNOWN_OPTIMIZERS", "check_optimizer", "named_for_huggingface"]

_NAMES = (*OPTIMIZERS, *(row.value for row in OptimizerNames))
KNOWN_OPTIMIZERS = (*_NAMES, *REFUSED)  # with those whose refusal says why


@contextmanager
def named_for_huggingface(config: TrainingArguments) -> Iterator[None]:
    """Inside, `optim` is a name that HuggingFace's own checks know.

    Raises:
        ConfigError: Nobody knows the name.
    """
    name = config.optim
    if name not in OPTIMIZERS:
        _check_name(str(getattr(name, "value", name)))
        yield
        return
    config.optim = OptimizerNames.ADAMW_TORCH
    try:
        yield
    finally:
        config.optim = name


def _check_name(name: str) -> None:
    check_not_refused(name)
    check_known("optim", name, _NAMES, "optimizer")


def check_optimizer(config: Any) -> None:
    """Reject options of the optimizer that are unknown, not allowed or without effect.

    Raises:
        ConfigError: Names the option, its value and what to do.
        ImportError: The package of the optimizer is not installed.
    """
    name = str(getattr(config.optim, "value", config.optim))
    apply(config, UPDATE_RULES, NAMED_OPTIMIZER_RULES)
    check_rates(config)
    if name not in OPTIMIZERS:
        _check_ignored(config, name)
    check_made(name, config)


def _check_ignored(config: Any, name: str) -> None:
    """Reject arguments that transformers would not pass on to its optimizer."""
    parts = config.optim_args.replace(" ", "").split(",") if config.optim_args else []
    parts = [part for part in parts if part.partition("=")[0] not in added_keys(name)]
    read = _arguments_of(config, parts) if parts else None
    for part in parts:
        if read is not None and _arguments_of(config, [other for other in parts if other != part]) == read:
            key = part.partition("=")[0]
            known = f" It passes on {', '.join(added_keys(name))}." if added_keys(name) else ""
            raise ConfigError(
                f"optim_args={config.optim_args!r}: {key!r} has no effect because transformers does not pass it to "
                f"optim={name!r}.{known} {_REMEDIES.get(key, _REMEDY)}"
            )


_REMEDY = "Remove it, or give the trainer your own optimizer: optimizers=(optimizer, None)."
_SCHEDULE = (
    "It replaces learning_rate and its schedule: set these, such as lr_scheduler_type='inverse_sqrt' with "
    "optim_args='scale_parameter=True'."
)
_REMEDIES = {"relative_step": _SCHEDULE, "warmup_init": _SCHEDULE}


def _arguments_of(config: TrainingArguments, parts: list[str]) -> Any:
    """What HuggingFace passes to the optimizer; None if that cannot be known before the model or package is there."""
    from transformers import Trainer  # takes seconds

    other = copy.copy(config)
    other.optim_args = ",".join(parts) or None
    try:
        return Trainer.get_optimizer_cls_and_kwargs(other)
    except (ImportError, ValueError):
        return None
