"""Keywords of a config that are no options of their own, but fill keys of others: `aipo_rho=4.0` fills `loss_kwargs`.

They are `dataclasses.InitVar`s of the config: its constructor and the command line take them, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import mapping_of
from prefrl.options.types import check_value

__all__ = ["FlatName", "fill_place", "fill_places", "init_vars", "set_aside", "without_flat_values"]


@dataclass(frozen=True)
class FlatName:
    """The place of a keyword.

    Args:
        option: The option that it fills.
        key: The key of that option's mapping; None: the option itself.
        only_with: An option and the value of it that the keyword belongs to, where the key alone does not say it.
        is_deprecated: Whether to warn.
        convert: From the keyword's value to that of the key; None: there is nothing to fill.
        is_fallback: Whether the keyword gives way to a key that is already there.
    """

    option: str
    key: str | None
    only_with: tuple[str, str] | None = None
    is_deprecated: bool = True
    convert: Callable[[Any], Any] | None = None
    is_fallback: bool = False


def init_vars(config_class: Any) -> dict[str, Any]:
    """The `InitVar`s of a dataclass with their defaults, in the order in which `__post_init__` gets their values."""
    every = config_class.__dataclass_fields__.values()  # dataclasses.fields leaves them out
    kind = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]  # there is no public name
    return {field.name: field.default for field in every if field._field_type is kind}


@cache
def _types(config_class: type) -> dict[str, Any]:
    """The types of `dataclasses.InitVar`s."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {name: hint.type for name, hint in hints.items() if isinstance(hint, dataclasses.InitVar)}


def without_flat_values(post_init: Callable[..., None]) -> Callable[..., None]:
    """The `__post_init__` of a derived class, which gets the values of its own `InitVar`s only.

    `dataclass` passes the values of all `InitVar`s by position, but who derives a class from a config does not know
    that the config has some.
    """

    @wraps(post_init)
    def with_own_values(self: Any, *values: Any) -> None:
        post_init(self, *set_aside(self, values))

    return with_own_values


def set_aside(config: Any, values: Sequence[Any]) -> list[Any]:
    """Keep the values of flat names for `fill_places`, if `values` are those that `dataclass` passes.

    Args:
        config: The config.
        values: What its `__post_init__` gets: from `dataclass`, or from that of a derived class, which comes first.

    Returns:
        The other values.
    """
    if "_flat_values" in vars(config):
        return list(values)
    given = dict(zip(init_vars(type(config)), values, strict=False))
    config._flat_values = {name: value for name, value in given.items() if name in config.flat_names}
    return [value for name, value in given.items() if name not in config.flat_names]


def fill_places(config: Any, places: Mapping[str, FlatName]) -> None:
    """Put the values of keywords that were given into their places. A default means: not given.

    Args:
        config: The config, after `set_aside`.
        places: The places of the keywords.

    Raises:
        ConfigError: A value has another type, a place is taken, or the keyword belongs to another value of an option.
    """
    config_class: Any = type(config)
    defaults, hints = init_vars(config_class), _types(config_class)
    for name, value in vars(config).pop("_flat_values").items():
        check_value(name, value, hints[name])
        if value == defaults[name]:
            continue
        place = places[name]
        filled = fill_place(config, name, value, place)
        if place.is_deprecated:
            key = repr(filled) if place.key is None else repr({place.key: filled})
            warnings.warn(
                f"{name} is deprecated and will be removed in prefrl 0.2. Write {place.option}={key} instead.",
                FutureWarning,
                stacklevel=4,  # the caller of the config's __init__
            )


def fill_place(config: Any, name: str, value: Any, place: FlatName) -> Any:
    """Put the value of a keyword into its place; returns what was put there.

    Raises:
        ConfigError: The place is taken, or the keyword belongs to another value of an option.
    """
    _check_choice(config, name, value, place)
    filled = value if place.convert is None else place.convert(value)
    if filled is not None or place.convert is None:
        _fill(config, name, value, filled, place)
    return filled


def _check_choice(config: Any, name: str, value: Any, place: FlatName) -> None:
    if place.only_with is not None:
        switch, choice = place.only_with
        if getattr(config, switch) != choice:
            raise ConfigError(
                f"{name}={value!r} has no effect because {switch}={getattr(config, switch)!r}. It goes with "
                f"{switch}={choice!r}."
            )


def _fill(config: Any, name: str, value: Any, filled: Any, place: FlatName) -> None:
    if place.key is None:
        is_taken, with_it = getattr(config, place.option) is not None, filled
    else:
        there = mapping_of(config, place.option)
        is_taken, with_it = place.key in there, {**there, place.key: filled}
    if is_taken and not place.is_fallback:
        there = getattr(config, place.option)
        raise ConfigError(f"{name}={value!r} and {place.option}={there!r}: given both ways. Remove {name}.")
    if not is_taken:
        setattr(config, place.option, with_it)
