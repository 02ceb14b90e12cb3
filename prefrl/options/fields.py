"""Declares and checks options: the fields of configs, and of the hyperparameters that they map to."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import numbers
import operator
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError

__all__ = [
    "check_bounds",
    "check_fields",
    "check_no_effect",
    "check_range",
    "check_unset",
    "default_of",
    "json_mapping",
    "mapping_of",
    "opt",
    "parse_json",
    "plain_value",
]


# Kind of bound -> its sign, the attribute that holds the limit, and the comparison.
_BOUNDS: dict[type, tuple[str, str, Callable[[Any, Any], bool]]] = {
    Ge: (">=", "ge", operator.ge),
    Gt: (">", "gt", operator.gt),
    Le: ("<=", "le", operator.le),
    Lt: ("<", "lt", operator.lt),
}


def opt(default: Any, description: str) -> Any:
    """A config field; `--help` and the tables in the docs are generated from its description."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": description})
    return dataclasses.field(default=default, metadata={"help": description})


def plain_value(option: Any) -> Any:
    """An option's value without its enum: HuggingFace makes enums of some texts when a config is made."""
    return getattr(option, "value", option)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that is not given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_fields(config: Any) -> None:
    """Check prefrl's own fields against the bounds and allowed values in their types.

    Raises:
        ConfigError: A number is out of bounds, or a value is not an allowed one.
    """
    config_class: Any = type(config)
    for name, hint in _own_hints(config_class).items():
        value = getattr(config, name)
        for part in _alternatives(hint):
            check_bounds(name, value, part)
        allowed = [v for part in _alternatives(hint) for v in _literals(part)]
        is_unset = value is None and type(None) in typing.get_args(hint)
        if allowed and not is_unset and value not in allowed:
            raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def parse_json(config: Any, *names: str) -> None:
    """Parse fields that the command line gave as JSON text, in place.

    Raises:
        ConfigError: The text is not a JSON object.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, str):
            setattr(config, name, json_mapping(value, name))


def mapping_of(config: Any, name: str) -> dict[str, Any]:
    """The mapping that an option holds, parsed if it is JSON text; empty for None.

    Raises:
        ConfigError: It is not a mapping.
    """
    parse_json(config, name)
    given = getattr(config, name)
    if not isinstance(given, dict | None):
        raise ConfigError(f'{name}={given!r}: must be a mapping such as {{"key": 1}}, or None')
    return given or {}


def json_mapping(text: str, name: str) -> dict[str, Any]:
    """The mapping that a JSON text stands for.

    Raises:
        ConfigError: The text is not a JSON object.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{name}={text!r}: must be a JSON object such as {{"key": 1}}: {error}') from error
    if not isinstance(parsed, dict):
        raise ConfigError(f'{name}={text!r}: must be a JSON object such as {{"key": 1}}')
    return parsed


def check_no_effect(*, name: str, value: object, unset: object, because: str, remedy: str) -> None:
    """Reject an option that is set but has no effect.

    Raises:
        ConfigError: `value` differs from `unset`.
    """
    if value != unset:
        raise ConfigError(f"{name}={value!r} has no effect because {because}. {remedy}")


def check_unset(config: Any, *names: str, because: str, remedy: str) -> None:
    """Reject options that differ from their defaults but have no effect.

    Raises:
        ConfigError: One of them is set.
    """
    defaults = {field.name: field for field in dataclasses.fields(config)}
    for name in names:
        unset = default_of(defaults[name])
        check_no_effect(name=name, value=getattr(config, name), unset=unset, because=because, remedy=remedy)


def check_range(bounds: Sequence[float] | None, name: str) -> None:
    """Reject bounds that are not two numbers in ascending order.

    Raises:
        ConfigError: Names the field.
    """
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ConfigError(f"{name}={bounds}: must be two numbers, the smaller one first, such as [-5, 5]")


@cache
def _own_hints(config_class: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for cls in reversed(config_class.__mro__):
        if cls.__module__.startswith("prefrl."):
            hints |= {
                n: h for n, h in typing.get_type_hints(cls, include_extras=True).items() if n in _annotations(cls)
            }
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: hint for name, hint in hints.items() if name in names}


def _annotations(cls: type) -> dict[str, Any]:
    return inspect.get_annotations(cls)


def _alternatives(hint: Any) -> list[Any]:
    args = typing.get_args(hint)
    is_union = typing.get_origin(hint) is not Annotated and type(None) in args
    return [arg for arg in args if arg is not type(None)] if is_union else [hint]


def _literals(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def check_bounds(name: str, value: Any, hint: Any) -> None:
    """Check a number against the bounds in a type; other types and None have none.

    Raises:
        ConfigError: It is out of bounds, NaN or no number.
    """
    if typing.get_origin(hint) is not Annotated or value is None:
        return
    bounds = typing.get_args(hint)[1:]
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ConfigError(f"{name}={value!r}: must be a number {_describe(bounds)}")
    for bound in bounds:
        _, attribute, holds = _BOUNDS[type(bound)]
        if not holds(value, getattr(bound, attribute)):
            raise ConfigError(f"{name}={value!r}: must be a number {_describe(bounds)}")


def _describe(bounds: tuple[Any, ...]) -> str:
    return " and ".join(f"{_BOUNDS[type(b)][0]} {getattr(b, _BOUNDS[type(b)][1])}" for b in bounds)
