"""The hyperparameters of a function, as a dataclass that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from prefrl.options.fields import check_fields, default_of
from prefrl.options.rules import Rule, apply

__all__ = ["Params", "hyperparameters"]


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def hyperparameters(cls: type[_T]) -> type[_T]:
    """`dataclass(frozen=True)` with the methods of `Params` in place of ones that are compiled for each class.

    The command makes some sixty of these classes before it reads an option.
    """
    return dataclass(frozen=True, init=False, repr=False, eq=False)(cls)


@hyperparameters
class Params:
    """Base of all hyperparameters. A field has a default, bounds in its type, and a description: see `opt`.

    Raises:
        ConfigError: A value has another type, is out of bounds, or breaks one of the `rules`.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()  # what the values must be together

    def __init__(self, *values: Any, **named: Any) -> None:
        options = fields(self)
        given = dict(zip((option.name for option in options), values, strict=False)) | named
        if len(values) > len(options) or given.keys() - {option.name for option in options}:
            raise TypeError(f"{type(self).__name__} has no hyperparameters {values or sorted(named)}")
        for option in options:
            value = given[option.name] if option.name in given else default_of(option)
            object.__setattr__(self, option.name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

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
