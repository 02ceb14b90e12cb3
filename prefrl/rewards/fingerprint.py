"""Recognizes whether a reward is the one that it was."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from prefrl.rewards.compute_score import ComputeScore
from prefrl.rewards.grader import Grader
from prefrl.rewards.model import ModelReward

__all__ = ["reward_fingerprint"]


def reward_fingerprint(function: Callable[..., Any]) -> str:
    """A hash of the source of a function or a class, or of the class of another callable; for a model, its name.

    Parameters of graders that decide their values are part of it. What the function calls is not.
    """
    if isinstance(function, ModelReward):
        return str(function.model.config.name_or_path)
    while isinstance(function, functools.partial | ComputeScore):
        function = function.func
    if isinstance(function, Grader):
        return _hashed(json.dumps([type(function).__name__, function.settings()], default=reward_fingerprint))
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):  # defined in a shell
        text = f"{target.__module__}.{target.__qualname__}"
    return _hashed(text)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
