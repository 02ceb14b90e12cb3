"""The hyperparameters of a function, as a dataclass that is checked when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from prefrl.options.fields import check_fields

__all__ = ["Params"]


@dataclass(frozen=True)
class Params:
    """Base of all hyperparameters. A field has a default, bounds in its type, and a description: see `opt`.

    Raises:
        ConfigError: A value has another type, is out of bounds, or breaks one of the `rules`.
    """

    # What the values must be together: functions of modules without torch, because the command calls them, too.
    rules: ClassVar[tuple[Callable[[Any], None], ...]] = ()

    def __post_init__(self) -> None:
        """Check types, bounds and rules."""
        check_fields(self)
        for rule in self.all_rules():
            rule(self)

    @classmethod
    def all_rules(cls) -> list[Callable[[Any], None]]:
        """The rules of this class and its bases, which come first."""
        return [rule for base in reversed(cls.__mro__) for rule in vars(base).get("rules", ())]

    @property
    def is_default(self) -> bool:
        """Whether every hyperparameter has its default."""
        return self == type(self)()

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
