"""Recognizes whether a reward is the one that it was."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from prefrl.rewards.model import ModelReward

__all__ = ["reward_fingerprint"]


def reward_fingerprint(function: Callable[..., Any]) -> str:
    """A hash of a function's source, or of the class of another callable; for a model, its name.

    What the function calls is not part of it.
    """
    if isinstance(function, ModelReward):
        return str(function.model.config.name_or_path)
    while isinstance(function, functools.partial):
        function = function.func
    target = function if inspect.isroutine(function) else type(function)
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):  # defined in a shell
        text = f"{target.__module__}.{target.__qualname__}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
