"""Rewards for answers in mathematics: numbers, and expressions that math-verify compares."""

from __future__ import annotations

import atexit
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from prefrl.errors import ConfigError, require
from prefrl.rewards.base import completion_text
from prefrl.rewards.math_checker import MathChecker, Verdict

# Longer strings of digits are not answers, and Python refuses to parse more than 4,300 digits.
_MAX_DIGITS = 100

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_EXPONENT = r"(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]|[.,/][0-9]))"
# How what begins like a number goes on if it is none: 1.5.2, 1,1,1, 1/1/1, 0x10, 1e5000, 3e.
_NO_NUMBER = r"(?:\s?/\s?[0-9]|[.,][0-9]|[eE](?![A-Za-z])|[xX])[0-9A-Za-z.,/+-]*"
_LATEX_FRACTION = rf"\\frac\s?(?:\{{\s?(-?{_UNSIGNED})\s?\}}\s?\{{\s?(-?{_UNSIGNED})\s?\}}|([0-9])\s?([0-9]))"
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}%])(-))?"  # a sign, not a subtraction
    r"(?:\\?[$\u20ac\u00a3]\s?(-)?)?"  # $5, -$5, $-5
    r"(?<![0-9A-Za-z_^/.])(?<![_^]\{)"  # the 2 of x_2, m^2 and CO2 is not a number
    rf"(?>(?:([0-9]+)\s?)?{_LATEX_FRACTION}"
    rf"|(?:([0-9]+)\s)?({_UNSIGNED})\s?/\s?({_UNSIGNED})(?![0-9])(?!\s?/\s?[0-9])"
    rf"|({_UNSIGNED}{_EXPONENT}?))"
    r"(?!\s?\^)"  # a power is not a plain number
    rf"({_NO_NUMBER})?"
    r"(\s?(?:\\?%|percent\b))?"
)
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad)(?![A-Za-z])")
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox)\s?\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?!frac(?![A-Za-z]))[A-Za-z]+")
_FACTORIAL = re.compile(r"[0-9)]!")
# `#### 72` is an answer, `#### Step 2` a heading.
_MARKER = re.compile(r"####(?=[\s*]*[-\\$\u20ac\u00a3.0-9])|\\(?:boxed|fbox)\s?\{|<answer>")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number; `50%` is stored as 50 and a flag for the percent sign."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: Number, tolerance: Fraction = Fraction(0)) -> bool:
        """Whether both are equal: 50% equals 50% and 0.5, and also 50, because a unit may be omitted.

        Args:
            other: The other number.
            tolerance: The largest difference of equal numbers, in the unit in which they are compared.
        """
        if abs(self.value - other.value) <= tolerance:
            return True
        return self.is_percent != other.is_percent and abs(self._ratio() - other._ratio()) <= tolerance

    def _ratio(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value


def final_part(text: str) -> str | None:
    """The text after the reasoning in `<think>` tags; the whole text without such tags; None if they stay open."""
    _, is_closed, rest = text.rpartition("</think>")
    if is_closed:
        return rest
    return None if "<think>" in text else text


def final_number(text: str) -> Number | None:
    r"""The answer at the end of a solution.

    It follows the last of `####`, `\boxed{` and `<answer>`, and must be the only number there. Without any of these
    markers, it is the last number of the text.
    """
    part = final_part(text)
    if part is None:
        return None
    markers = list(_MARKER.finditer(part))
    if markers:
        answer = _marked(part, markers[-1])
        return None if answer is None else only_number(answer)
    numbers = list(_NUMBER.finditer(_plain(part)))
    return _number(numbers[-1]) if numbers else None


def only_number(text: str) -> Number | None:
    """The number in a text that contains no other number and no other mathematics; else None."""
    plain = _plain(text)
    if _COMMAND.search(plain) or _FACTORIAL.search(plain):
        return None
    numbers = {_number(match) for match in _NUMBER.finditer(plain)}
    return numbers.pop() if len(numbers) == 1 else None


def _marked(text: str, marker: re.Match[str]) -> str | None:
    rest = text[marker.end() :]
    if marker[0] == "####":
        return rest.strip().partition("\n")[0]
    if marker[0] == "<answer>":
        answer, is_closed, _ = rest.partition("</answer>")
        return answer if is_closed else None
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return None


def _plain(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",")
    text = re.sub(r"(?<=[0-9])(?:\\[,! ])+(?=[0-9]{3})", ",", text)
    text = _SPACING.sub(" ", text)
    text = _STYLED.sub(r"\1", text)
    return re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)


def _number(match: re.Match[str]) -> Number | None:
    sign, inner_sign, whole, top, bottom, digit_top, digit_bottom, mixed, ratio_top, ratio_bottom, plain = (
        match.groups()[:-2]
    )
    *_, rest, percent = match.groups()
    if rest is not None or len(match[0]) > _MAX_DIGITS:
        return None
    numerator = _fraction(top or digit_top or ratio_top or plain)
    denominator = _fraction(bottom or digit_bottom or ratio_bottom or "1")
    if denominator == 0:
        return None
    value = numerator / denominator
    integer = whole or mixed
    if integer is not None and 0 < value < 1:  # 2 1/2
        value += int(integer)
    return Number(-value if bool(sign) != bool(inner_sign) else value, is_percent=percent is not None)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


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
        tolerance: Largest difference between a completion's final number and the answer with which it still counts as
            correct.
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


_checker = MathChecker(timeout=10.0, budget=60.0, num_workers=min(4, os.cpu_count() or 1))
atexit.register(_checker.close)


class MathReward:
    r"""1 if a completion's answer equals the solution as mathematics, 0 if not; None if the solution is unreadable.

    The answer is inside `\boxed{}`, or in LaTeX after words such as "the final answer is". A comparison that takes
    longer than 10 seconds is abandoned and scores 0. A batch gets 60 seconds: completions that have not been begun by
    then get None.

    Args:
        name: The name under which the reward is logged.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def setup(self) -> None:
        """Fail before training starts rather than after the first generation.

        Raises:
            ImportError: math-verify is not installed.
        """
        require("math_verify", extra="math", feature=self.__name__)

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Score B completions.

        Args:
            completions: B texts or lists of messages.
            solution: B correct answers, in LaTeX or plain.
            log_extra: Gets the columns `gold_parsed` and `answer_parsed`.
            log_metric: Gets the share of completions that could not be checked in time.
        """
        verdicts = self._verdicts([completion_text(completion) for completion in completions], solution)
        if log_extra is not None:
            log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
            log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
        if log_metric is not None and verdicts:
            unchecked = sum(not verdict.is_checked for verdict in verdicts)
            log_metric(f"{self.__name__}/unchecked_fraction", unchecked / len(verdicts))
        return [None if verdict.gold is None else float(verdict.is_correct) for verdict in verdicts]

    def _verdicts(self, texts: Sequence[str], solution: Sequence[str | float | None]) -> list[Verdict]:
        pairs = zip(texts, solution, strict=True)
        checked = iter(_checker.check([(text, str(gold)) for text, gold in pairs if gold is not None]))
        return [Verdict(None) if gold is None else next(checked) for gold in solution]


class ReasoningReward:
    """A `MathReward` for the text after the reasoning. A completion whose reasoning does not end gets 0.

    Args:
        reward: Reward that scores the answers. Both have the same name.
    """

    def __init__(self, reward: MathReward) -> None:
        self.__name__ = reward.__name__
        self.setup = reward.setup
        self._reward = reward

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        reasoning_delimiters: Sequence[str] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Score B completions.

        Args:
            completions: B texts or lists of messages.
            solution: B correct answers, in LaTeX or plain.
            reasoning_delimiters: Texts that end the reasoning. The answer follows the last occurrence of the first of
                them that a completion contains. None means those of `</think>`.
            log_extra: See `MathReward`.
            log_metric: See `MathReward`.

        Raises:
            ConfigError: `reasoning_delimiters` is not a list of texts.
        """
        ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
        if isinstance(ends, str) or not ends or not all(isinstance(end, str) and end for end in ends):
            raise ConfigError(f"reasoning_delimiters={ends!r}: must be a list of texts, such as ['</think>']")
        # Without an end there is no answer to read, but the solution is still parsed.
        answers = [_after(completion_text(completion), ends) for completion in completions]
        return self._reward(answers, solution, log_extra, log_metric)


def _after(text: str, ends: Sequence[str]) -> str:
    """What follows the last occurrence of the first of some texts that is in `text`; nothing if none is."""
    return next((text.rpartition(end)[2] for end in ends if end in text), "")


accuracy_reward = MathReward("accuracy_reward")
reasoning_accuracy_reward = ReasoningReward(MathReward("reasoning_accuracy_reward"))


@dataclass(frozen=True, slots=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    @property
    def __name__(self) -> str:
        return "cosine_scaled_reward"

    def setup(self) -> None:
        accuracy_reward.setup()

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: Sequence[str | float | None],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float | None]:
        correct = accuracy_reward(completions, solution)
        return [self._scaled(c, len(ids)) for c, ids in zip(correct, completion_ids, strict=True)]

    def _scaled(self, correct: float | None, length: int) -> float | None:
        if correct is None:
            return None
        shortest, longest = (
            (self.max_value_correct, self.min_value_correct)
            if correct
            else (self.min_value_wrong, self.max_value_wrong)
        )
        progress = min(length / self.max_len, 1.0)  # beyond 1, the cosine would rise again
        return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(math.pi * progress))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaledReward:
    """A reward for the length L of answers: `r_L + (r_0 - r_L) (1 + cos(pi L / max_len)) / 2`.

    Short correct answers get the highest reward, and short wrong ones the lowest. `accuracy_reward` decides what is
    correct; its None stays None.

    Args:
        max_len: Number of tokens beyond which the reward no longer changes.
        min_value_wrong: Value of r_0 for a wrong answer.
        max_value_wrong: Value of r_L for a wrong answer.
        min_value_correct: Value of r_L for a correct answer.
        max_value_correct: Value of r_0 for a correct answer.
    Raises:
        ConfigError: `max_len` is not positive, or a minimum is above its maximum.
    Source: Yeo et al. 2025, arXiv 2502.03373, appendix C.1
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len}: needs to be >= 1, in tokens; use max_completion_length")
    for kind, low, high in (
        ("wrong", min_value_wrong, max_value_wrong),
        ("correct", min_value_correct, max_value_correct),
    ):
        if not low <= high:
            raise ConfigError(f"min_value_{kind}={low} is above max_value_{kind}={high}: swap them")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
