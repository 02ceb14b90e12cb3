"""Checks that numeric and boolean options have the right type: a string would fail deep inside torch, or never."""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from prefrl.errors import ConfigError

__all__ = ["check_types"]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


# Type -> its name in error messages, and the test for a value. NumPy scalars count as numbers, too.
_TYPES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    float: ("a number", _is_number),
    int: ("an integer", _is_integer),
    bool: ("True or False", lambda value: not isinstance(value, str)),
    str: ("a string", lambda value: isinstance(value, str)),
}


def check_types(config: Any, *, texts: bool = False) -> None:
    """Check the type of every option that is a number, a boolean or a list of these, HuggingFace's included.

    Args:
        config: A dataclass instance, whose values may still be of any type.
        texts: Whether to check strings, too. HuggingFace's string options may also be paths or enums.

    Raises:
        ConfigError: An option has another type, such as a string: YAML reads 1e-5 as a string.
    """
    config_class: Any = type(config)
    for name, (kind, is_optional, is_list) in _typed_options(config_class).items():
        value = getattr(config, name)
        if (value is None and is_optional) or (kind is str and not texts):
            continue
        allowed, is_right = _TYPES[kind]
        if is_list:
            if not isinstance(value, list | tuple) or not all(is_right(item) for item in value):
                raise ConfigError(f"{name}={value!r}: must be a list, each entry {allowed}")
        elif not is_right(value):
            raise ConfigError(f"{name}={value!r}: must be {allowed}.{_remedy(value, kind)}")


@cache
def _typed_options(config_class: type) -> dict[str, tuple[type, bool, bool]]:
    """For each option of a type in `_TYPES`: the type, whether None is allowed, and whether it is a list of them."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    options = {}
    for field in dataclasses.fields(config_class):
        parts = _parts(hints[field.name])
        kinds = [part for part in parts if part is not type(None)]
        items = typing.get_args(kinds[0]) if len(kinds) == 1 and typing.get_origin(kinds[0]) is list else ()
        kind = items[0] if items else kinds[0]
        if len(kinds) == 1 and kind in _TYPES:
            options[field.name] = (kind, len(parts) > len(kinds), bool(items))
    return options


def _parts(hint: Any) -> list[Any]:
    """The members of a union type, without their bounds."""
    if typing.get_origin(hint) is Annotated:
        return _parts(typing.get_args(hint)[0])
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        return [part for argument in arguments for part in _parts(argument)]
    return [hint]


def _remedy(value: Any, kind: type) -> str:
    if not isinstance(value, str) or kind is str:
        return ""
    if kind is bool:
        is_switch = value.lower() in ("true", "false")
        return f" Write {value.capitalize()} without quotation marks, in YAML {value.lower()}." if is_switch else ""
    try:
        number = kind(value)
    except ValueError:
        return ""
    return f" Write {_literal(number)} without quotation marks; YAML reads 1e-5 as a string and 1.0e-5 as a number."


def _literal(number: float) -> str:
    """The number as both Python and YAML read it: 1.0e-05, because YAML reads 1e-05 as a string."""
    mantissa, e, exponent = repr(number).partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(number)
