"""The hyperparameters of a function, as a dataclass that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Self

from prefrl.options.fields import check_fields
from prefrl.options.rules import Rule, apply

__all__ = ["Params"]


@dataclass(frozen=True)
class Params:
    """Base of all hyperparameters. A field has a default, bounds in its type, and a description: see `opt`.

    Raises:
        ConfigError: A value has another type, is out of bounds, or breaks one of the `rules`.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()  # what the values must be together

    def __post_init__(self) -> None:
        """Check types, bounds and rules."""
        check_fields(self)
        apply(self, self.all_rules())

    @classmethod
    def all_rules(cls) -> list[Rule]:
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
