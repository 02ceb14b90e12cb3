"""What `prefrl migrate` makes of a file: its new text, and what it has to say about it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prefrl.options.foreign import Row
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import RewardArguments

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


def applied(text: bytes, edits: Collection[Edit]) -> bytes:
    """The text with all edits, which do not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + edit.text.encode() + text[edit.end :]
    return text


@cache
def accepted(config: str) -> frozenset[str]:
    """The keywords of the constructor of a config or a trainer with this name; none if there is no such class."""
    paths = [path for row in REGISTRY.values() for path in (row.config, row.trainer) if path.endswith(f":{config}")]
    if not paths:
        return frozenset()
    row = next(row for row in REGISTRY.values() if paths[0] in (row.config, row.trainer))
    found = row.load_config() if paths[0] == row.config else row.load_trainer()
    return frozenset(inspect.signature(found.__init__).parameters) - {"self"}


@cache
def options_of(command: str) -> frozenset[str]:
    """The options of `prefrl <command>`."""
    script = {entry.name for entry in dataclasses.fields(RewardArguments)}
    return accepted(REGISTRY[command].config.partition(":")[2]) | script


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
