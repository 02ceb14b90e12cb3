"""Freeze parameters of a model by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["freeze_parameters"]


def freeze_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Do not train the parameters whose name contains a match of one of some regular expressions.

    Raises:
        ConfigError: An expression is none, matches nothing or only what is frozen, or nothing is left to train.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        for name in _matches(pattern, model, trainable):
            trainable[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in trainable.values()):
        if patterns:
            raise ConfigError(f"freeze={list(patterns)}: no parameter is left to train")
        remedy = " Load its adapter with is_trainable=True." if is_peft_model(model) else ""
        raise ConfigError(f"no parameter of the model requires a gradient: nothing can be trained.{remedy}")


def _matches(pattern: str, model: PreTrainedModel, trainable: Mapping[str, object]) -> list[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"freeze={pattern!r} is not a regular expression: {error}") from error
    names = [name for name, _ in model.named_parameters() if expression.search(name)]
    if not names:
        some = [name for name, _ in model.named_parameters()][:3]
        raise ConfigError(f"freeze={pattern!r} matches no parameter name. Names look like {', '.join(some)}.")
    matches = [name for name in names if name in trainable]
    if not matches:
        raise ConfigError(
            f"freeze={pattern!r} has no effect: all {len(names)} parameters that it matches are frozen already"
        )
    return matches
