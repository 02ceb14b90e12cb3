"""Reads YAML files of options: plain values only, and no more of them than options have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from prefrl.errors import ConfigError

# No file of options is larger: characters, values counted where an alias repeats them, and levels.
_MAX_CHARACTERS, _MAX_VALUES, _MAX_LEVELS = 2**18, 10_000, 20
_YAML = "tag:yaml.org,2002:"
_TAGS = frozenset(
    f"{_YAML}{name}" for name in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp")
)
NULL_TAG = f"{_YAML}null"


def read_yaml(path: Path, where: str) -> tuple[yaml.Node | None, yaml.SafeLoader]:
    """The root of a file, None if it is empty, and the loader that makes values of its nodes.

    Args:
        path: The file.
        where: The option that names it, for error messages.

    Raises:
        ConfigError: It cannot be read, is not YAML, or holds tags, too much, or too many levels.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _not_yaml(path, where, error) from error
    return parse_yaml(text, path, where)


def parse_yaml(text: str, path: Path, where: str) -> tuple[yaml.Node | None, yaml.SafeLoader]:
    """The root of a text; see `read_yaml`.

    Args:
        text: The content of the file.
        path: The file, for error messages.
        where: What names it, for error messages.

    Raises:
        ConfigError: It is not YAML, or holds tags, too much, or too many levels.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{where}: has more than {_MAX_CHARACTERS} characters: is it a file of options?")
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _not_yaml(path, where, error) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: must have at most {_MAX_LEVELS} levels of nesting") from error
    if root is not None:
        _check_node(root, path, {})
    return root, loader


def load_yaml(path: Path, where: str) -> Any:
    """The value in a file; None if it is empty.

    Raises:
        ConfigError: See `read_yaml`; or a value is not what its tag says.
    """
    root, loader = read_yaml(path, where)
    try:
        return None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(path, where, error) from error


def _not_yaml(path: Path, where: str, error: Exception) -> ConfigError:
    """One line with the place in the file, where it is known."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return ConfigError(f"{where}: is not YAML: {error}")
    assert isinstance(error, yaml.MarkedYAMLError)
    tab = " YAML has no tabs between its words: write spaces." if "'\\t'" in str(error.problem) else ""
    return ConfigError(f"{path}:{mark.line + 1}: is not YAML: {error.problem}, in column {mark.column + 1}.{tab}")


def _check_node(node: yaml.Node, path: Path, sizes: dict[int, int], level: int = 0) -> int:
    """The number of values in a node. Refuses tags, deep nesting, and aliases that stand for too many values."""
    where = f"{path}:{node.start_mark.line + 1}"
    if node.tag not in _TAGS:
        raise ConfigError(f"{where}: the tag {node.tag.replace(_YAML, '!!')!r} is not allowed. Write a plain value.")
    if level > _MAX_LEVELS:  # a node that contains itself, too
        raise ConfigError(f"{where}: must have at most {_MAX_LEVELS} levels of nesting")
    if id(node) not in sizes:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        children = [part for pair in pairs for part in pair]
        children += node.value if isinstance(node, yaml.SequenceNode) else []
        sizes[id(node)] = 1 + sum(_check_node(child, path, sizes, level + 1) for child in children)
    if sizes[id(node)] > _MAX_VALUES:
        raise ConfigError(f"{where}: must have at most {_MAX_VALUES} values, counted where an alias repeats them")
    return sizes[id(node)]


def entries_of(path: Path) -> list[tuple[str, int, yaml.Node, yaml.SafeLoader]]:
    """The name, line number and value of each option in a YAML file, with the loader."""
    root, loader = read_yaml(path, f"config={str(path)!r}")
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: must be a mapping of options to values")
    loader.flatten_mapping(root)
    entries = [(str(key.value), key.start_mark.line + 1, value, loader) for key, value in root.value]
    lines: dict[str, int] = {}
    for name, line, _, _ in entries:
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} was already set in line {lines[name]}. Remove one of them.")
        lines[name] = line
    return entries


def places_of(name: str, node: yaml.Node, path: Path, line: int) -> dict[str, str]:
    """Where an option of the file stands, and each entry in it, by names such as datasets[1].path."""
    places = {name: f"{path}:{line}"}
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            places |= places_of(f"{name}[{i}]", item, path, item.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            places |= places_of(f"{name}.{key.value}", value, path, key.start_mark.line + 1)
    return places
