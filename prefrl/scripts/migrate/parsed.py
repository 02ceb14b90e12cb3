"""Finds which dataclasses a script parses from the command line, and what it calls them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Parsed", "parsed_options"]

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
    """What a script parses; None if it calls no parser.

    Args:
        tree: The script.
        name_of: The public name of TRL that an expression stands for.
    """
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
        if isinstance(node.targets[0], ast.Tuple) and _parses(node.value):
            for variable, name in zip(node.targets[0].elts, names, strict=False):
                if isinstance(variable, ast.Name) and name is not None:
                    found.variables[variable.id] = name
    return found


def _parses(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) in _METHODS


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
