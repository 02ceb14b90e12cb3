"""Keywords of a config that are no options of their own: `vespo_k_pos=4.0` fills a key of the option `loss_kwargs`.

They are `dataclasses.InitVar`s of the config: its constructor and the command line take them, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import mapping_of

__all__ = ["FlatName", "fill_place", "fill_places", "flat_parameters"]


@dataclass(frozen=True)
class FlatName:
    """The place of a keyword.

    Args:
        option: The option that it fills.
        key: The key of that option's mapping; None: the option itself.
    """

    option: str
    key: str | None


@cache
def flat_parameters(config_class: type) -> dict[str, inspect.Parameter]:
    """The parameters of the constructor that are no fields, in the order in which `__post_init__` gets them."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    parameters = inspect.signature(config_class).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in fields}


def fill_places(config: Any, values: Sequence[Any], places: Mapping[str, FlatName]) -> None:
    """Put the values of keywords that were given into their places. A default means: not given.

    Args:
        config: The config.
        values: One for each of `flat_parameters`.
        places: The places of the keywords.

    Raises:
        ConfigError: A place is taken.
    """
    config_class: Any = type(config)
    for (name, parameter), value in zip(flat_parameters(config_class).items(), values, strict=True):
        if value == parameter.default:
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
