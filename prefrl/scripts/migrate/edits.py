"""What `prefrl migrate` makes of a file: its new text, and what it says about it; which options a script parses."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, AnyStr

from prefrl.options.fields import flat_names
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.command import RewardArguments
from prefrl.scripts.arguments.launch import LaunchArguments
from prefrl.scripts.migrate.rows import Counterpart
from prefrl.scripts.schema import early_class
from prefrl.scripts.schema import options_of as schema_options


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
    """The text, as characters or as bytes, with all edits, which do not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + as_text(edit.text) + text[edit.end :]
    return text


@cache
def accepted(config: str) -> frozenset[str]:
    """The options of a config with this name, without those of the command alone; none if there is no such class."""
    of_command = {field.name for cls in (RewardArguments, LaunchArguments) for field in dataclasses.fields(cls)}
    found = (row.name for row in REGISTRY.values() if row.config.endswith(f":{config}"))
    return frozenset[str]().union(*(option_names_of(name) for name in found)) - of_command - {"preset"}


@cache
def other_names(config: str) -> dict[str, str]:
    """Names of TRL that a config takes for whole options, and these options."""
    found = (flat_names(early_class(row.name)) for row in REGISTRY.values() if row.config.endswith(f":{config}"))
    return {name: place.option for places in found for name, place in places.items() if place.key is None}


@cache
def switches() -> dict[str, list[str]]:
    """The options that have no effect without others, and these."""
    every = [option for command in REGISTRY for option in schema_options(command)]
    return {option["name"]: option["needs"] for option in every if option.get("needs") not in (None, ["episodes"])}


@cache
def option_names_of(command: str) -> frozenset[str]:
    """The options of `prefrl <command>`, without the names that it takes only because TRL has them."""
    places = flat_names(early_class(command))
    every = schema_options(command)
    return frozenset(option["name"] for option in every if not option.get("is_hidden") or option["name"] in places)


@cache
def every_option() -> frozenset[str]:
    """The options of all commands."""
    return frozenset[str]().union(*(option_names_of(command) for command in REGISTRY))


def converted(row: Counterpart, value: Any) -> Mapping[str, Any] | str:
    """The options that a value becomes, or why it cannot be converted."""
    if row.convert is None:
        return row.text
    try:
        return row.convert(value)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{row.text}; {value!r} cannot be converted" + (f": {error}" if isinstance(error, ValueError) else "")


_PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser")
_METHODS = ("parse_args_and_config", "parse_args_into_dataclasses")


@dataclass(frozen=True)
class Parsed:
    """What a script parses.

    Args:
        parser: The name of the parser's class, where it is called.
        classes: Dataclasses of TRL by name, where the parser is given them.
        variables: What the script calls the results, and the names of their classes.
        statement: The assignment of the parser to a variable, if that is how it is made.
    """

    parser: ast.expr
    statement: ast.Assign | None
    classes: dict[str, ast.expr] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> str | None:
        """The name of the config."""
        return next((name for name in self.classes if name.endswith("Config") and name != "ModelConfig"), None)

    def variable_of(self, name: str | None) -> str | None:
        """What the script calls the instance of a class."""
        return next((variable for variable, cls in self.variables.items() if cls == name), None)


def parsed_options(tree: ast.AST, name_of: Callable[[ast.expr], str | None]) -> Parsed | None:
    """What a script parses; None if it calls no parser."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    call = next((call for call in calls if _last_name(call.func) in _PARSERS and call.args), None)
    if call is None:
        return None
    given = call.args[0].elts if isinstance(call.args[0], ast.Tuple | ast.List) else [call.args[0]]
    names = [name_of(node) for node in given]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    statement = next((node for node in assigned if node.value is call and isinstance(node.targets[0], ast.Name)), None)
    classes = {name: node for name, node in zip(names, given, strict=True) if name is not None}
    found = Parsed(call.func, statement, classes)
    for node in assigned:
        is_parsed = isinstance(node.value, ast.Call) and _last_name(node.value.func) in _METHODS
        if is_parsed and isinstance(node.targets[0], ast.Tuple):
            for variable, name in zip(node.targets[0].elts, names, strict=False):
                if isinstance(variable, ast.Name) and name is not None:
                    found.variables[variable.id] = name
    return found


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
