"""The types of options with their bounds, and checks of values against them."""

from __future__ import annotations

import enum
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError

LARGEST_INTEGER = 2**63 - 1
_LARGEST_FLOAT = 1e38  # in round numbers what 32 bits hold
# What several options have in common. The bounds are above all that is in use, and below what hangs or overflows.
BatchSize = Annotated[int, Ge(1), Le(10**9)]
Length = Annotated[int, Ge(1), Le(2 * 10**7)]  # in tokens
NumSamples = Annotated[int, Ge(1), Le(2**16)]  # completions of a prompt
Seconds = Annotated[float, Gt(0), Le(10**9)]  # more than Python's locks can wait for is an OverflowError

TruncationMode = Literal["keep_start", "keep_end", "error"]
# The side from which tokens are cut off.
TRUNCATION_SIDES: dict[TruncationMode, Literal["left", "right", "error"]] = {
    "keep_start": "right",
    "keep_end": "left",
    "error": "error",
}
# What the next turn sees of the thinking in earlier ones: what the template prints, all of it, or nothing.
ReasoningInHistory = Literal["template", "keep", "strip"]
ToolErrorMode = Literal["tell", "raise"]
EnvironmentErrorMode = Literal["retry", "drop", "raise"]

_LONGEST = 200  # characters of a value in a message

_UNIONS = (typing.Union, types.UnionType)
# Kind of bound -> its sign, the attribute that holds the limit, and the comparison.
_BOUNDS: dict[type, tuple[str, str, Callable[[Any, Any], bool]]] = {
    Ge: (">=", "ge", operator.ge),
    Gt: (">", "gt", operator.gt),
    Le: ("<=", "le", operator.le),
    Lt: ("<", "lt", operator.lt),
}
# What bounds a number on the sides on which its type has no bound: `Le(math.inf)` allows infinity.
_DEFAULT_BOUNDS: dict[type, tuple[Any, Any]] = {
    float: (Ge(-_LARGEST_FLOAT), Le(_LARGEST_FLOAT)),
    int: (Ge(-LARGEST_INTEGER), Le(LARGEST_INTEGER)),
}


@dataclass(frozen=True)
class _Kind:
    """What a type allows, in words and as a test; bounds are in the words only."""

    words: str
    fits: Callable[[Any], bool]


def check_value(name: str, value: Any, hint: Any) -> None:
    """Check a value against a type.

    Args:
        name: What messages call the value.
        value: Anything.
        hint: The type: None, bool, int, float, str, any other class, Literal, lists and mappings of these, unions, and
            Annotated numbers with bounds. A list may be a tuple, and numbers may be those of NumPy.

    Raises:
        ConfigError: The value has another type; or a number is NaN, infinite or too large, or out of its bounds; or
            a text has the character NUL.
    """
    kind = _kind_of(hint)
    if not kind.fits(value):
        raise ConfigError(f"{name}={_shown(value)}: must be {kind.words}.{_remedy(value, hint)}")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}={_shown(value)}: must not contain the character NUL")
    _check_bounds(name, value, hint)


def _check_bounds(name: str, value: Any, hint: Any) -> None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        _check_bounds(name, value, next(part for part in arguments if _kind_of(part).fits(value)))
    elif origin is list:
        for number, item in enumerate(value):
            _check_bounds(f"{name}[{number}]", item, arguments[0])
    elif origin is dict:
        for key, item in value.items():
            _check_bounds(f"{name}[{key!r}]", item, arguments[1])
    elif (number_type := arguments[0] if origin is Annotated else hint) in _DEFAULT_BOUNDS:
        _check_number(name, value, _bounds_of(hint), *_DEFAULT_BOUNDS[number_type])


def _bounds_of(hint: Any) -> list[Any]:
    return [bound for bound in typing.get_args(hint)[1:] if type(bound) in _BOUNDS]


def _check_number(name: str, value: Any, bounds: list[Any], low: Any, high: Any) -> None:
    """Check a number against its bounds, and against the default ones on the sides on which it has none."""
    sides = {type(bound) in (Ge, Gt) for bound in bounds}
    every = [*bounds, *[low] * (True not in sides), *[high] * (False not in sides)]
    broken = []
    for bound in every:
        _, attribute, comparison = _BOUNDS[type(bound)]
        if not comparison(value, getattr(bound, attribute)):
            broken.append(bound)
    if broken:
        described = _described([*bounds, *(bound for bound in broken if bound not in bounds)])
        raise ConfigError(f"{name}={_shown(value)}: must be a number {described}")


def _described(bounds: Iterable[Any]) -> str:
    limits = [(_BOUNDS[type(bound)][0], getattr(bound, _BOUNDS[type(bound)][1])) for bound in bounds]
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if (sign, limit) != ("<=", math.inf))


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_switch(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # the latter is NumPy's, which is not imported for this


_KINDS: dict[Any, _Kind] = {
    float: _Kind("a number", lambda value: isinstance(value, numbers.Real) and not _is_switch(value)),
    int: _Kind("an integer", lambda value: isinstance(value, numbers.Integral) and not _is_switch(value)),
    bool: _Kind("True or False", lambda value: _is_switch(value) or (isinstance(value, int) and value in (0, 1))),
    str: _Kind("a string", lambda value: isinstance(value, str)),
    type(None): _Kind("None", lambda value: value is None),
    dict: _Kind(
        'a mapping such as {"key": 1}',
        lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
    ),
    list: _Kind("a list", lambda value: isinstance(value, list | tuple)),
    os.PathLike: _Kind("a path", lambda value: isinstance(value, os.PathLike)),
}


def _kind_of(hint: Any) -> _Kind:
    return _kind(hint, getattr(hint, "__args__", ()))


@cache  # also by the parts: unions of the same types in another order are equal, but are described in their own order
def _kind(hint: Any, written: tuple[Any, ...]) -> _Kind:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _KINDS:
        return _KINDS[hint]
    if origin is Annotated:
        base = _kind_of(arguments[0])
        return _Kind(f"{base.words} {_described(_bounds_of(hint))}".rstrip(), base.fits)
    if origin is Literal:
        return _choice(arguments)
    if origin in _UNIONS:
        # HuggingFace makes an enum of a text, which must be one of its values.
        has_enum = any(map(_is_enum, arguments))
        kinds = [_kind_of(part) for part in arguments if not (has_enum and part is str)]
        *others, last = [kind.words for kind in kinds]
        words = f"{', '.join(others)}, or {last}" if others else last
        return _Kind(words, lambda value: any(kind.fits(value) for kind in kinds))
    if origin is list:
        item = _kind_of(arguments[0])
        return _Kind(
            f"a list, each entry {item.words}", lambda value: _KINDS[list].fits(value) and all(map(item.fits, value))
        )
    if origin is dict:
        return _mapping(*arguments)
    return _class(origin or hint)


def _choice(choices: tuple[Any, ...]) -> _Kind:
    words = ", ".join(map(repr, choices))
    return _Kind(
        f"one of {words}" if len(choices) > 1 else words,
        lambda value: any(isinstance(value, type(choice)) and value == choice for choice in choices),
    )


def _mapping(key: Any, item: Any) -> _Kind:
    whole, keys, items = _KINDS[dict], _kind_of(key), _kind_of(item)
    words = whole.words if item is Any else f"{whole.words}, each value {items.words}"
    return _Kind(
        words,
        lambda value: isinstance(value, dict) and all(map(keys.fits, value)) and all(map(items.fits, value.values())),
    )


def _class(hint: Any) -> _Kind:
    """Any other class; what is no class, such as Any, allows everything."""
    if _is_enum(hint):
        return _choice(tuple(member.value for member in hint))
    if not isinstance(hint, type) or getattr(hint, "_is_protocol", False) or hint is Any:
        return _Kind("anything", lambda value: True)
    if issubclass(hint, os.PathLike):
        return _KINDS[os.PathLike]
    return _Kind(f"of type {hint.__name__}", lambda value: isinstance(value, hint))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _remedy(value: Any, hint: Any) -> str:
    kinds = [part for part in _parts(hint) if part is not type(None) and not _is_enum(part)]
    kind = kinds[0] if len(kinds) == 1 else None
    if kind is str and isinstance(value, bool):
        return " In YAML, put no, off, yes and on into quotation marks."
    if not isinstance(value, str) or kind not in (bool, int, float):
        return ""
    if kind is bool:
        is_switch = value.lower() in ("true", "false")
        return f" Write {value.capitalize()} without quotation marks, in YAML {value.lower()}." if is_switch else ""
    try:
        number = kind(value)
    except ValueError:
        return ""
    return f" Write {_literal(number)} without quotation marks; YAML reads 1e-5 as a string and 1.0e-5 as a number."


def _parts(hint: Any) -> list[Any]:
    """The members of a union, without their bounds."""
    if typing.get_origin(hint) is Annotated:
        return _parts(typing.get_args(hint)[0])
    return (
        [part for argument in typing.get_args(hint) for part in _parts(argument)]
        if typing.get_origin(hint) in _UNIONS
        else [hint]
    )


def _literal(number: float) -> str:
    """The number as both Python and YAML read it: 1.0e-05, because YAML reads 1e-05 as a string."""
    mantissa, e, exponent = repr(number).partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(number)


@dataclass(frozen=True)
class LengthBound:
    """What options say about the length of rows.

    Args:
        max_length: Tokens of a prepared row; None: no limit.
        options: How the message calls the options to lower.
        sampled: Tokens that are sampled after each row, which is a prompt.
    """

    max_length: int | None
    options: str
    sampled: int = 0
