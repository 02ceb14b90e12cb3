"""Rules between options, as rows of tables: what cannot be combined, what is said about it, and options that show it.

`tests/unit/test_rules.py` finds all tables of this package, and runs the example of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.fields import default_of, plain_value


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
    """

    breaks: Callable[[Any], object]
    message: str
    example: Example
    values: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)

    def check(self, options: Any) -> None:
        """Refuse options that break the row.

        Raises:
            ConfigError: Names the options, their values and what to do.
        """
        if found := self.breaks(options):
            raise ConfigError(self.message.format_map(_Words(options, self.values, found)))


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
    breaks: Callable[[Any], object], message: str, example: Example, /, **values: Callable[[Any], object]
) -> Rule:
    """A row that refuses options for which `breaks` is true; see `Rule`."""
    return Rule(breaks, message, example, values)


def unset(given: Mapping[str, Any], if_: Callable[[Any], object], why: str, example: Example, /) -> tuple[Rule, ...]:
    """A row for each option that has no effect under a condition: it must then have its default.

    Args:
        given: The options, each with a value that is not its default, for the examples.
        if_: The condition.
        why: The condition in words, and what to do, as in `Rule.message`.
        example: Options that meet the condition.
    """

    def row(name: str, value: Any) -> Rule:
        return Rule(
            lambda options: if_(options) and getattr(options, name) != _default(options, name),
            f"{name}={{{name}!r}} has no effect because {why}",
            replace(example, options={**example.options, name: value}),
        )

    return tuple(row(name, value) for name, value in given.items())


def ascending(name: str, example: Example) -> Rule:
    """A row for two bounds: numbers, the smaller one first; None: no bounds."""

    def breaks(options: Any) -> bool:
        bounds = getattr(options, name)
        return bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1])

    return when(breaks, f"{name}={{{name}}}: must be two numbers, the smaller one first, such as [-5, 5]", example)


def apply(options: Any, *tables: Iterable[Rule]) -> None:
    """Check options against the rows of tables, in their order.

    Raises:
        ConfigError: By the first row that is broken.
    """
    for rule in chain.from_iterable(tables):
        rule.check(options)


def _default(options: Any, name: str) -> Any:
    return next(default_of(option) for option in fields(options) if option.name == name)
