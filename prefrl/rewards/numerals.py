r"""Read numbers in text exactly: integers, decimals, exponents, fractions and percentages, with or without LaTeX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Number", "final_number", "final_part", "only_number"]

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
