"""What `prefrl migrate` makes of a file: its new text, and what it has to say about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, AnyStr

from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import RewardArguments
from prefrl.scripts.arguments.launch import LaunchArguments
from prefrl.scripts.migrate.foreign import Row
from prefrl.scripts.schema.parser import options_of as schema_options

__all__ = ["Edit", "Migrated", "accepted", "applied", "every_option", "options_of"]


@dataclass
class Migrated:
    """The new text of a file, and notes by line number.

    Args:
        text: The new text.
        changes: What was changed.
        open: What has no counterpart, and what to do.
    """

    text: str
    changes: list[tuple[int, str]] = field(default_factory=list)
    open: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Edit:
    """Replace the part of a text from `start` to `end`."""

    start: int
    end: int
    text: str


def applied(text: AnyStr, edits: Collection[Edit], as_text: Callable[[str], AnyStr]) -> AnyStr:
    """The text with all edits, which do not overlap.

    Args:
        text: As characters or as bytes.
        edits: Their places count those.
        as_text: Turns what is new into characters or bytes.
    """
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + as_text(edit.text) + text[edit.end :]
    return text


@cache
def accepted(config: str) -> frozenset[str]:
    """The options of a config with this name, without those of the command alone; none if there is no such class."""
    of_command = {field.name for cls in (RewardArguments, LaunchArguments) for field in dataclasses.fields(cls)}
    found = (row.name for row in REGISTRY.values() if row.config.endswith(f":{config}"))
    return frozenset[str]().union(*(options_of(name) for name in found)) - of_command - {"preset"}


@cache
def options_of(command: str) -> frozenset[str]:
    """The options of `prefrl <command>`."""
    return frozenset(option["name"] for option in schema_options(command))


@cache
def every_option() -> frozenset[str]:
    """The options of all commands."""
    return frozenset[str]().union(*(options_of(command) for command in REGISTRY))


def converted(row: Row, value: Any) -> Mapping[str, Any] | str:
    """The options that a value becomes, or why it cannot be converted."""
    if row.convert is None:
        return row.text
    try:
        return row.convert(value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{row.text}; {value!r} cannot be converted" + (f": {error}" if isinstance(error, ValueError) else "")
