"""Check what a reward function returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from prefrl.errors import RewardError

__all__ = ["checked_values", "excerpt"]

# Rewards become float32 tensors.
_LARGEST = float(np.finfo(np.float32).max)
_ALLOWED = "allowed is a finite number (in float32) for each completion, or None if the reward does not apply to it"
_EXCERPT = 60


def checked_values(
    name: str, result: object, prompts: Sequence[Any], completions: Sequence[str | list[dict[str, Any]]]
) -> list[float | None]:
    """Convert the values that a reward function returned for B completions to floats.

    Lists, tuples, other sequences, and one-dimensional arrays and tensors are accepted. Values may be any real
    numbers, including those of NumPy, and zero-dimensional tensors. True is 1 and False is 0.

    Args:
        name: Name of the reward, for messages.
        result: What it returned.
        prompts: B prompts, for messages.
        completions: B completions, for messages.
    Raises:
        RewardError: The result has another type or length, or a value is NaN, infinite or not a number.
    """
    values = _as_list(name, result)
    if len(values) != len(completions):
        raise RewardError(
            f"reward {name!r} returned {len(values)} values for {len(completions)} completions; {_ALLOWED}"
        )
    return [_as_float(name, row, v, prompts[row], completions[row]) for row, v in enumerate(values)]


def _as_list(name: str, result: object) -> list[Any]:
    if isinstance(result, torch.Tensor | np.ndarray):
        if result.ndim != 1:
            raise RewardError(
                f"reward {name!r} returned an array of shape {tuple(result.shape)}; {_ALLOWED}: shape [B]"
            )
        values: list[Any] = result.tolist()
        return values
    if isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray):
        return list(result)
    remedy = ""
    if inspect.iscoroutine(result):
        result.close()
        remedy = ". It was not awaited, because the function is not an `async def`: make it one"
    elif result is None:
        remedy = ". Is a `return` missing?"
    raise RewardError(f"reward {name!r} returned {_shown(result)}; {_ALLOWED}, in a list{remedy}")


def _as_float(name: str, row: int, value: object, prompt: Any, completion: str | list[dict[str, Any]]) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    number = _finite(value)
    if number is not None:
        return number
    raise RewardError(
        f"reward {name!r}, row {row}: returned {_shown(value)}; {_ALLOWED}. The completion is {excerpt(completion)}, "
        f"the prompt {excerpt(prompt)}"
    )


def excerpt(text: Any) -> str:
    """The beginning of a text, or of the last message, in quotes and with control characters escaped."""
    is_chat = isinstance(text, list) and bool(text) and isinstance(text[-1], Mapping)
    shown = str(text[-1].get("content") if is_chat else text or "")
    return repr(shown if len(shown) <= _EXCERPT else f"{shown[:_EXCERPT]}...")


def _finite(value: object) -> float | None:
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if abs(number) <= _LARGEST else None  # the comparison is False for NaN


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= _EXCERPT else text[:_EXCERPT] + '...'} ({type(value).__name__})"
