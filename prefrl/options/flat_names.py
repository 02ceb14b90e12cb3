"""Keywords of a config that are no options of their own: `vespo_k_pos=4.0` fills a key of the option `loss_kwargs`.

They are `dataclasses.InitVar`s of the config: its constructor and the command line take them, and nothing else does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import hints_of, mapping_of
from prefrl.options.types import check_value

__all__ = [
    "FlatName",
    "fill_place",
    "fill_places",
    "flat",
    "flat_names",
    "init_vars",
    "set_aside",
    "without_flat_values",
]


@dataclass(frozen=True)
class FlatName:
    """The place of a keyword.

    Args:
        option: The option that it fills.
        key: The key of that option's mapping; None: the option itself.
    """

    option: str
    key: str | None


def flat(option: str, key: str | None = None, *, default: Any = None) -> Any:
    """The declaration of a keyword, as the default of an `InitVar`; at that default, it counts as not given.

    Args:
        option: See `FlatName`.
        key: See `FlatName`.
        default: For keywords of which None is a value.
    """
    return dataclasses.field(default=default, metadata={"place": FlatName(option, key)})


def flat_names(config_class: Any) -> dict[str, FlatName]:
    """The places of the keywords of a config."""
    declared = config_class.__dataclass_fields__
    return {name: field.metadata["place"] for name, field in declared.items() if "place" in field.metadata}


def init_vars(config_class: Any) -> dict[str, Any]:
    """The `InitVar`s of a dataclass with their defaults, in the order in which `__post_init__` gets their values."""
    every = config_class.__dataclass_fields__.values()  # dataclasses.fields leaves them out
    kind = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]  # there is no public name
    return {field.name: field.default for field in every if field._field_type is kind}


@cache
def _types(config_class: type) -> dict[str, Any]:
    """The types of `dataclasses.InitVar`s."""
    hints = hints_of(config_class)
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
    given, places = dict(zip(init_vars(type(config)), values, strict=False)), flat_names(type(config))
    config._flat_values = {name: value for name, value in given.items() if name in places}
    return [value for name, value in given.items() if name not in places]


def fill_places(config: Any) -> None:
    """Put the values of keywords that were given into their places. A default means: not given.

    Args:
        config: The config, after `set_aside`.

    Raises:
        ConfigError: A value has another type, or a place is taken.
    """
    config_class: Any = type(config)
    defaults, hints, places = init_vars(config_class), _types(config_class), flat_names(config_class)
    for name, value in vars(config).pop("_flat_values").items():
        check_value(name, value, hints[name])
        if value == defaults[name]:
            continue
        fill_place(config, name, value, places[name])


def fill_place(config: Any, name: str, value: Any, place: FlatName) -> None:
    """Put the value of a keyword into its place.

    Raises:
        ConfigError: The place is taken.
    """
    if place.key is None:
        is_taken, filled = getattr(config, place.option) is not None, value
    else:
        there = mapping_of(config, place.option)
        is_taken, filled = place.key in there, {**there, place.key: value}
    if is_taken:
        given = getattr(config, place.option)
        raise ConfigError(f"{name}={value!r} and {place.option}={given!r}: given both ways. Remove {name}.")
    setattr(config, place.option, filled)
