"""The hyperparameters of a function, as a dataclass that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from prefrl.options.fields import check_fields
from prefrl.options.types import check_types

__all__ = ["Params"]


@dataclass(frozen=True)
class Params:
    """Base of all hyperparameters. A field has a default, bounds in its type, and a description: see `opt`.

    Raises:
        ConfigError: A value has another type, or is out of bounds.
    """

    def __post_init__(self) -> None:
        """Check types and bounds."""
        check_types(self, texts=True)
        check_fields(self)

    @classmethod
    def names(cls) -> list[str]:
        """The names of the hyperparameters."""
        return [field.name for field in fields(cls)]

    @classmethod
    def from_options(cls, options: object) -> Self:
        """The hyperparameters from the options of the same names.

        Raises:
            ConfigError: A value has another type, or is out of bounds.
        """
        return cls(**{name: getattr(options, name) for name in cls.names()})
