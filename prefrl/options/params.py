"""Hyperparameters as dataclasses that are checked when they are made, and the options that map names to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, FrozenInstanceError, dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from prefrl.errors import ConfigError
from prefrl.options.fields import (
    Rule,
    about,
    apply,
    check_fields,
    check_unset,
    default_of,
    mapping_of,
    opt,
    warn_of_hint,
)
from prefrl.options.names import nearest

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def hyperparameters(cls: type[_T]) -> type[_T]:
    """`dataclass(frozen=True)` with the methods of `Params` in place of ones that are compiled for each class.

    The command makes some sixty of these classes before it reads an option.
    """
    return dataclass(init=False, repr=False, eq=False)(cls)


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
        check_fields(self)  # types and bounds
        apply(self, *(vars(base).get("rules", ()) for base in reversed(type(self).__mro__)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

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


P = TypeVar("P", bound=Params)
KwargsValue = dict[str, Any] | str | None  # None: all defaults; a text is JSON, from the command line


def kwargs(
    description: str,
    choices: Mapping[Any, type[Params]] | type[Params],
    *,
    switch: str | None = None,
    own_options: tuple[str, ...] = (),
    label: str = "",
    off: str = "",
    same: Mapping[str, Any] = MappingProxyType({}),
    others_elsewhere: bool = False,
    **facts: Any,
) -> Any:
    """A field of a config that maps names to hyperparameters; for the arguments, see `KwargsOption` and `opt`."""
    by_value = choices if isinstance(choices, Mapping) else {None: choices}
    option = KwargsOption("", description, switch, by_value, own_options, label, off, same, others_elsewhere)
    return opt(None, option.help, kwargs=option, **facts)


@cache
def kwargs_options(config_class: Any) -> tuple[KwargsOption[Any], ...]:
    """The options of a config that map names to hyperparameters."""
    declared = {field.name: about(field).kwargs for field in fields(config_class)}
    return tuple(replace(option, name=name) for name, option in declared.items() if option is not None)


@dataclass(frozen=True)
class ParamsOf(Generic[P]):
    """The hyperparameters that an option maps to, as an attribute of configs.

    Args:
        option: The option.
        params: The class that all of its choices derive from.
        if_off: Whether there are hyperparameters, those of `params`, even if the option's part is off.
    """

    option: str
    params: type[P]
    if_off: bool = False

    def __get__(self, config: Any, config_class: type) -> P:
        option = next(option for option in kwargs_options(config_class) if option.name == self.option)
        return self.params() if self.if_off and option.is_off(config) else option.of(config)


@dataclass(frozen=True)
class KwargsOption(Generic[P]):
    """An option whose keys are the hyperparameters of one part, among several that another option chooses from.

    `loss_kwargs={"rho": 4.0}` belongs to the loss that `loss_type` names.

    Args:
        name: The option.
        description: What the part is.
        switch: The attribute of the config that chooses the part; None: there is one part, which is always on.
        choices: The hyperparameters of each part, by the value of the switch; those of True are for a switch with any
            value that is true. Any other value means: no part.
        own_options: Hyperparameters that are options of their own, where a config has them.
        label: How messages call the switch, if it is not an option itself.
        off: Why there is no part and what to do, if the switch does not say it.
        same: Keys that ask for nothing if there is no part, such as TRL's defaults.
        others_elsewhere: Whether other values of the switch have keys, too, which this class does not know.
    """

    name: str
    description: str
    switch: str | None
    choices: Mapping[Any, type[P]]
    own_options: tuple[str, ...] = ()
    label: str = ""
    off: str = ""
    same: Mapping[str, Any] = field(default_factory=dict)
    others_elsewhere: bool = False

    @property
    def help(self) -> str:
        """What the part is, and the keys of every choice with their defaults."""
        parts, keys_of = [self.description], self.keys()
        for choices, keys in keys_of.items():
            where = "every value" if choices == "all" else choices
            listed = ", ".join(f"{key.name}={default_of(key)!r}" for key in keys)
            parts.append(f"Keys{f' for {where}' if len(keys_of) > 1 else ''}: {listed}.")
        return " ".join([*parts, "On the command line, give it as JSON."])

    def keys(self) -> dict[str, list[Field[Any]]]:
        """The keys as dataclass fields, by the names of the choices that have them; "all" for what all have."""
        by_params: dict[type[P], list[str]] = {}
        for choice, params in self.choices.items():
            by_params.setdefault(params, []).append(str(choice))
        shared = set.intersection(*(set(self._keys_of(params)) for params in by_params))
        groups = {
            ", ".join(names): [key for name, key in self._keys_of(params).items() if name not in shared]
            for params, names in by_params.items()
        }
        groups["all"] = [key for name, key in self._keys_of(next(iter(by_params))).items() if name in shared]
        return {choices: keys for choices, keys in groups.items() if keys}

    def _keys_of(self, params: type[P]) -> dict[str, Field[Any]]:
        return {field.name: field for field in fields(params) if field.name not in self.own_options}

    def is_off(self, config: Any) -> bool:
        """Whether there is no part."""
        return self._chosen(config) is None

    def of(self, config: Any) -> P:
        """The hyperparameters of the part that is on.

        Raises:
            ConfigError: A value has the wrong type, or is out of bounds.
        """
        params, given = self._chosen(config), mapping_of(config, self.name)
        assert params is not None
        own = {name: getattr(config, name) for name in self._own(config) if name in params.names()}
        try:
            return params(**given, **own)
        except ConfigError as error:
            is_key = str(error).partition("=")[0] in given
            raise ConfigError(f"{self.name}: {error}" if is_key else str(error)) from None

    def check(self, config: Any) -> None:
        """Reject keys that the part does not have, and values that are not allowed; warn of any key without a part.

        Raises:
            ConfigError: Names the option, the key, its value and what to do.
        """
        params, given = self._chosen(config), mapping_of(config, self.name)
        if params is None:
            if given and given != self.same and not self.others_elsewhere:
                able = [choice for choice, other in self.choices.items() if given.keys() <= {*other.names()}]
                reason = self.off or f"{self._where(config)}. {self._remedy(able or self.choices)}"
                warn_of_hint(config, f"{self.name}={given!r} has no effect because {reason}")
            return
        self._check_keys(config, params, given)
        for name in self._own(config):
            if name not in params.names():
                remedy = self._remedy(self._choices_with(name))
                check_unset(config, name, because=self._where(config), remedy=remedy)
        self.of(config)

    def _check_keys(self, config: Any, params: type[P], given: Mapping[str, Any]) -> None:
        known = self._keys_of(params)
        for key, value in given.items():
            if key in known:
                continue
            if key in self._own(config):
                raise ConfigError(f"{self.name}: {key}={value!r} is a separate option. Set {key}={value!r}.")
            where = f" with {self._where(config)}" if self.switch is not None else ""
            if others := self._choices_with(key):
                remedy = self._remedy(others)
            else:
                remedy = nearest(str(key), known) if known else "It has no keys."
            raise ConfigError(f"{self.name}: {key}={value!r} is not known{where}. {remedy}")

    def _choices_with(self, key: str) -> list[Any]:
        return [choice for choice, params in self.choices.items() if key in params.names()]

    def _remedy(self, choices: Iterable[Any]) -> str:
        return f"It goes with {self._switch_name}={' or '.join(map(repr, choices))}."

    def _where(self, config: Any) -> str:
        return f"{self._switch_name}={getattr(config, str(self.switch))!r}"

    @property
    def _switch_name(self) -> str:
        return self.label or str(self.switch)

    def _chosen(self, config: Any) -> type[P] | None:
        value = None if self.switch is None else getattr(config, self.switch)
        return self.choices.get(value, self.choices.get(True) if value else None)

    def _own(self, config: Any) -> Iterator[str]:
        names = {field.name for field in fields(config)}
        return (name for name in self.own_options if name in names)
