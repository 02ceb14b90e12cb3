"""Declares and checks options: fields of configs and of hyperparameters, other names of their keys, and rules.

A rule is a row of a table: what cannot be combined, what is said about it, and options that show it. What cannot be
done as asked is an error. A hint has nothing to act on, such as workers where there is no work for them: it changes no
update, and is a warning, or with `strict_options=True` an error, too.
`tests/unit/test_rules.py` finds all tables of this package, and runs the example of each row.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.types import check_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlatName:
    """The place of a field whose value belongs to another option: `vespo_k_pos=4.0` fills a key of `loss_kwargs`.

    Args:
        option: The option that it fills.
        key: The key of that option's mapping; None: the option itself.
    """

    option: str
    key: str | None


@dataclass(frozen=True)
class About:
    """What a field says of itself besides its type, default and description; see `opt`."""

    decides: bool = True
    needs: tuple[str, ...] = ()
    kwargs: Any = None  # a `KwargsOption`, if the option maps names to hyperparameters
    place: FlatName | None = None
    is_listed: bool = True


class Help(str):
    """The description of a field, and what else is known of it: HfArgumentParser allows no other metadata."""

    about: About


def opt(
    default: Any,
    description: str,
    *,
    decides: bool = True,
    needs: Sequence[str] = (),
    kwargs: Any = None,
    place: FlatName | None = None,
    is_listed: bool = True,
) -> Any:
    """A field of a config, or of hyperparameters.

    Args:
        default: Its value if it is not given.
        description: What `--help` and the tables in the docs say.
        decides: Whether it decides the updates, so that a resumed run may not change it.
        needs: The switches without which it has no effect: names of options, or episodes.
        kwargs: See `prefrl.options.params.kwargs`.
        place: See `flat`.
        is_listed: Whether help, docs and trackers show it.
    """
    text = Help(description.replace("%", "%%"))  # argparse formats it
    text.about = About(decides, tuple(needs), kwargs, place, is_listed)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


def flat(option: str | None = None, key: str | None = None, *, default: Any = None) -> Any:
    """A field of a config that is only a name of another library. At its default, it is not given.

    Either it is another name for a place in an option: `__post_init__` moves the value there and sets the field back,
    so that a copy of the config has it once. Or there is nothing to set, and a row of a table answers other values.

    Args:
        option: See `FlatName`; None: there is nothing to set here.
        key: See `FlatName`.
        default: For fields of which None is a value.
    """
    if option is None:
        text = "Accepted for scripts of other libraries; see docs/migrating_from_trl.md."
        return opt(default, text, decides=False, is_listed=False)
    place = option if key is None else f"the key {key} of {option}"
    return opt(default, f"TRL's name for {place}.", decides=False, place=FlatName(option, key), is_listed=False)


def about(field: dataclasses.Field[Any]) -> About:
    """What `opt` was told about a field; fields of other classes say nothing."""
    text = field.metadata.get("help")
    return text.about if isinstance(text, Help) else About()


def plain_value(option: Any) -> Any:
    """An option's value without its enum: HuggingFace makes enums of some texts when a config is made."""
    return getattr(option, "value", option)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that is not given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_fields(config: Any, hints: Mapping[str, Any] = MappingProxyType({}), *, of: type | None = None) -> None:
    """Check fields of a dataclass against their types, and the bounds and allowed values in them.

    Args:
        config: A dataclass instance, whose values may still be of any type. A default is right in any case.
        hints: Types of fields that are not those of their annotations.
        of: The base whose fields are checked; None: all fields.

    Raises:
        ConfigError: A value has another type, is out of bounds, or is not an allowed one.
    """
    for name, (hint, default) in _typed_fields(of or type(config)).items():
        value = getattr(config, name)
        if value is not default:
            check_value(name, value, hints.get(name, hint))


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


def read_json(config: Any, name: str) -> dict[str, Any]:
    """The mapping of an option that may also be JSON text or the path of a JSON file; empty for other values.

    Raises:
        ConfigError: There is no such file, or it does not hold a mapping.
    """
    value = getattr(config, name)
    if not isinstance(value, str):
        return value if isinstance(value, dict) else {}
    try:
        text = value if value.startswith("{") else Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={value!r}: must be a mapping, or a JSON file: {error}") from error
    return json_mapping(text, name)


def check_unset(config: Any, *names: str, because: str, remedy: str) -> None:
    """Reject options that differ from their defaults but have no effect.

    Raises:
        ConfigError: One of them is set.
    """
    defaults = {field.name: field for field in dataclasses.fields(config)}
    for name in names:
        if (value := getattr(config, name)) != default_of(defaults[name]):
            raise ConfigError(f"{name}={value!r} has no effect because {because}. {remedy}")


@cache
def hints_of(config_class: Any) -> dict[str, Any]:
    """The types of fields, with their bounds. They are texts until then, and there are hundreds."""
    return typing.get_type_hints(config_class, include_extras=True)


@cache
def _typed_fields(config_class: type) -> dict[str, tuple[Any, Any]]:
    """The type of each field, and its default."""
    hints = hints_of(config_class)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(config_class)}


def flat_names(config_class: Any) -> dict[str, FlatName]:
    """The fields of a config whose values belong to other options, and where."""
    places = {field.name: about(field).place for field in fields(config_class)}
    return {name: place for name, place in places.items() if place is not None}


def listed_fields(config_class: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a config that are options of prefrl: all but those that are only names of TRL."""
    return [field for field in fields(config_class) if about(field).is_listed]


def fill_places(config: Any) -> None:
    """Move the values of flat names that were given into their places. A key's own default is not given either.

    Args:
        config: The config, whose values may still be of any type.

    Raises:
        ConfigError: A value has another type, or a place is taken.
    """
    config_class: Any = type(config)
    typed = _typed_fields(config_class)
    for name, place in flat_names(config_class).items():
        hint, default = typed[name]
        value = getattr(config, name)
        check_value(name, value, hint)
        if value != default:
            _fill(config, name, value, place)
            setattr(config, name, default)


@cache
def _defaults_of_key(config_class: Any, place: FlatName) -> list[Any]:
    """What a key is if it is not given, in a list; nothing if the place is no key, or has several defaults."""
    kwargs = about(config_class.__dataclass_fields__[place.option]).kwargs
    params = [] if kwargs is None else set(kwargs.choices.values())
    defaults = [default_of(key) for each in params for key in fields(each) if key.name == place.key]
    return defaults if all(default == defaults[0] for default in defaults) else []


def _fill(config: Any, name: str, value: Any, place: FlatName) -> None:
    config_class: Any = type(config)
    if place.key is None:
        unset = _typed_fields(config_class)[place.option][1]
        is_taken, filled = getattr(config, place.option) != unset, value
    else:
        there = mapping_of(config, place.option)
        is_taken, filled = place.key in there, {**there, place.key: value}
    if is_taken:
        given = getattr(config, place.option)
        raise ConfigError(f"{name}={value!r} and {place.option}={given!r}: given both ways. Remove {name}.")
    if value not in _defaults_of_key(config_class, place):
        setattr(config, place.option, filled)


@dataclass(frozen=True)
class Example:
    """The fewest options of an algorithm that break a row. Tests add `output_dir` and `use_cpu=True`."""

    algorithm: str
    options: Mapping[str, Any]
    processes: int = 1


@dataclass(frozen=True)
class Rule:
    """A row.

    Args:
        breaks: What is true, or not empty, if options break the row.
        message: What is then said, as a template: a name in braces is an option or a property of the config, or one of
            `values`. `{found}` is what `breaks` returned. Other braces are doubled.
        example: Options that break this row, and none before it.
        values: What the message takes from the options beyond their own values.
        hint: Whether the options that break the row change no update: they have nothing to act on.
        resets: Values that options get after the warning, where code of HuggingFace reads them.
    """

    breaks: Callable[[Any], object]
    message: str
    example: Example
    values: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    hint: bool = False
    resets: Mapping[str, Any] = field(default_factory=dict)


def warn_of_hint(options: Any, text: str) -> None:
    """Say that options have no effect: once in a run, on its first process.

    Args:
        options: Those of the run. They say nothing if they are checked again in a moment; see `EarlyConfig`.
        text: Names the option, its value, why it has no effect and what to do.

    Raises:
        ConfigError: With `strict_options`.
    """
    if options.strict_options:
        raise ConfigError(text)
    if options.gives_warnings and os.environ.get("RANK", "0") == "0":
        _warn_once(text)


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


@dataclass(frozen=True)
class _Words:
    """What the names in a message stand for."""

    options: Any
    values: Mapping[str, Callable[[Any], object]]
    found: object

    def __getitem__(self, name: str) -> Any:
        if name == "found":
            return self.found
        value = self.values[name](self.options) if name in self.values else getattr(self.options, name)
        return plain_value(value)


def example(algorithm: str, /, *, processes: int = 1, **options: Any) -> Example:
    """Options of an algorithm, by its name in the registry, for a run on one or several processes."""
    return Example(algorithm, options, processes)


def when(
    breaks: Callable[[Any], object],
    message: str,
    example: Example,
    /,
    *,
    hint: bool = False,
    resets: Mapping[str, Any] = MappingProxyType({}),
    **values: Callable[[Any], object],
) -> Rule:
    """A row that refuses options for which `breaks` is true, or warns of them; see `Rule`."""
    return Rule(breaks, message, example, values, hint, resets)


def unset(
    given: Mapping[str, Any],
    if_: Callable[[Any], object],
    why: str,
    example: Example,
    /,
    *,
    hint: bool = False,
    same: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Rule, ...]:
    """A row for each option that has no effect under a condition: it should then have its default.

    Args:
        given: The options, each with a value that is not its default, for the examples.
        if_: The condition.
        why: The condition in words, and what to do, as in `Rule.message`.
        example: Options that meet the condition.
        hint: See `Rule`.
        same: Other values of these options that ask for nothing, such as TRL's defaults.
    """

    def row(name: str, value: Any) -> Rule:
        others = [same[name]] if name in same else []
        return Rule(
            lambda options: (
                if_(options)
                and getattr(options, name) not in (default_of(options.__dataclass_fields__[name]), *others)
            ),
            f"{name}={{{name}!r}} has no effect because {why}",
            replace(example, options={**example.options, name: value}),
            hint=hint,
        )

    return tuple(row(name, value) for name, value in given.items())


def ascending(name: str, example: Example) -> Rule:
    """A row for two bounds: numbers, the smaller one first; None: no bounds."""
    return when(
        lambda o: (bounds := getattr(o, name)) is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]),
        f"{name}={{{name}}}: must be two numbers, the smaller one first, such as [-5, 5]",
        example,
    )


def apply(options: Any, *tables: Iterable[Rule]) -> None:
    """Check options against the rows of tables, in their order; those that break a hint are warned of.

    Raises:
        ConfigError: By the first row that is broken and no hint: names the options, their values and what to do.
    """
    for rule in chain.from_iterable(tables):
        if not (found := rule.breaks(options)):
            continue
        text = rule.message.format_map(_Words(options, rule.values, found))
        if not rule.hint:
            raise ConfigError(text)
        warn_of_hint(options, text)
        for name, value in rule.resets.items():
            setattr(options, name, value)
