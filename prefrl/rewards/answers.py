"""A reward for the right final number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from prefrl.errors import ConfigError
from prefrl.rewards.base import completion_text
from prefrl.rewards.numerals import Number, final_number, only_number

__all__ = ["get_numeric_reward", "numeric_reward"]


def numeric_reward(
    completions: Sequence[str | list[dict[str, Any]]], answer: Sequence[str | float | None], **_: Any
) -> list[float | None]:
    r"""1 if a completion's final number is exactly the answer, 0 if it is another number or there is none.

    The final number follows the last `####`, or is in the last `\boxed{}` or `<answer>`, whichever comes last, and
    must be the only number there. Without any of these markers, it is the last number of the text. Reasoning up to
    `</think>` is skipped; if the reasoning is never closed, there is no answer. Thousands separators, currency signs,
    fractions, decimals and percentages are understood. Numbers are compared as exact fractions.

    Args:
        completions: B texts or lists of messages.
        answer: B correct answers: a number, a text with one number, or a solution in GSM8K's format, which ends with
            `#### N`.
    Returns:
        B rewards; None where the answer itself is not a number.
    """
    return _EXACT(completions, answer)


@dataclass(frozen=True, slots=True)
class _NumericReward:
    tolerance: Fraction

    @property
    def __name__(self) -> str:
        return "numeric_reward"

    def __call__(
        self, completions: Sequence[str | list[dict[str, Any]]], answer: Sequence[str | float | None], **_: Any
    ) -> list[float | None]:
        return [self._score(completion_text(c), _gold(a)) for c, a in zip(completions, answer, strict=True)]

    def _score(self, text: str, gold: Number | None) -> float | None:
        if gold is None:
            return None
        number = final_number(text)
        return float(number is not None and number.equals(gold, self.tolerance))


_EXACT = _NumericReward(Fraction(0))


def get_numeric_reward(tolerance: float = 0.0) -> _NumericReward:
    """`numeric_reward`, which also accepts numbers that are near the answer.

    Args:
        tolerance: The largest difference between a completion's final number and the answer for which it is right.
    Raises:
        ConfigError: The tolerance is not a finite number >= 0.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance={tolerance}: must be a finite number >= 0")
    return _NumericReward(Fraction(repr(tolerance)))  # 0.1 means a tenth, not the nearest binary number


def _gold(answer: str | float | None) -> Number | None:
    if isinstance(answer, str):
        is_marked = "####" in answer or "\\boxed" in answer
        return final_number(answer) if is_marked else only_number(answer)
    if isinstance(answer, Rational):
        return Number(Fraction(answer))
    if isinstance(answer, float) and math.isfinite(answer):
        return Number(Fraction(repr(answer)))  # 0.1 means a tenth, not the nearest binary number
    return None
