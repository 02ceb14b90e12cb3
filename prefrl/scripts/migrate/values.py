"""Reads the values of another library's files, by the paths of their keys."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, Literal

import yaml

from prefrl.errors import ConfigError

__all__ = ["UNKNOWN", "Values", "library_of", "of_command", "of_toml", "of_yaml"]

Values = dict[str, tuple[int, Any]]  # path of keys -> line number and value

# Mappings with these names are arguments of something else.
_WHOLE = ("_kwargs", "override_config")
# What stands for a value that is not in the file: ${...} of OmegaConf, or a variable of the shell.
UNKNOWN = re.compile(r"\$[{(\w]")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
# Of OmegaConf: the value of a key, or a default.
_SELECT = "oc.select:"
# References may name references; more of them refer to each other in a circle. No value gets longer than that.
_MAX_ROUNDS, _MAX_CHARACTERS = 10, 2**12


def library_of(text: str) -> Literal["verl", "ludwig"] | None:
    """Whose YAML this is; None: that of neither verl nor Ludwig.

    Raises:
        ConfigError: It is axolotl's.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    keys = {key.value: value for key, value in pairs}
    sections = {key for key, value in keys.items() if isinstance(value, yaml.MappingNode)}
    if "actor_rollout_ref" in sections or {"data", "trainer"} <= sections or {"data", "model"} <= sections:
        return "verl"
    if {"input_features", "output_features"} & keys.keys():
        return "ludwig"
    if "base_model" in keys:
        raise ConfigError(
            "this is a file of axolotl, which is not migrated: the table in docs/migrating_from_verl_and_cosmos_rl.md "
            "says what its keys are here"
        )
    return None


def of_yaml(text: str, known: Collection[str]) -> Values:
    """The values of a YAML file, with its references to keys of its own put in.

    Args:
        text: The file.
        known: The library's paths of keys. A mapping of arguments is one value, unless keys of it are known.

    Raises:
        ConfigError: A value cannot be read.
    """

    def leaves(node: yaml.Node, path: str, line: int) -> Iterator[tuple[str, tuple[int, Any]]]:
        is_whole = path.endswith(_WHOLE) and not any(name.startswith(f"{path}.") for name in known)
        if isinstance(node, yaml.MappingNode) and node.value and not is_whole:
            for key, value in node.value:
                yield from leaves(value, f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1)
        else:
            yield path, (line, _number(_constructed(node, path)))

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return _resolved(dict(leaves(root, "", 1))) if isinstance(root, yaml.MappingNode) else {}


def of_toml(text: str, *whole: str) -> Values:
    """The values of a TOML file.

    Args:
        text: The file.
        whole: Names of mappings that are values.

    Raises:
        ConfigError: It is not TOML.
    """
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError("this file of TOML is nested too deeply: is it a file of options?") from error
    except ValueError as error:  # also of numbers that Python does not read
        raise ConfigError(f"this is not TOML: {error}") from error
    lines = _lines_of_toml(text, whole)
    return {path: (lines.get(path, 1), value) for path, value in _flat(tree, whole)}


def of_command(text: str, sections: Collection[str]) -> Values:
    """The words `path.of.keys=value` of a shell script, with the variables that it sets itself.

    Args:
        text: The script.
        sections: The first keys of such paths.
    """
    values: Values = {}
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(_expanded(line.rstrip().removesuffix("\\"), variables), comments=True)
        except ValueError:  # a quotation over several lines
            continue
        for word in words:
            name, _, value = word.partition("=")
            path = name.lstrip("+")
            if path.split(".")[0] in sections and "." in path:
                values[path] = (number, _number(_loaded(value, path)))
            elif name.isidentifier():
                variables[name] = value
    return values


def _constructed(node: yaml.Node, path: str) -> Any:
    return _loaded(yaml.serialize(node), path)


def _loaded(text: str, path: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: this value cannot be read: {str(error).splitlines()[0]}") from error


def _resolved(values: Values) -> Values:
    """The values with those of the keys that they refer to, as far as the file has them."""
    for _ in range(_MAX_ROUNDS):
        found = {path: (line, _put_in(path, value, values)) for path, (line, value) in values.items()}
        if found == values:
            break
        values = found
    return values


def _put_in(path: str, value: Any, values: Values) -> Any:
    """A value with its references put in; those within a text or a list become text."""
    if isinstance(value, list):
        return [_filled(path, entry, values) if isinstance(entry, str) else entry for entry in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    return _filled(path, value, values) if alone is None else _referred(path, alone, values)


def _filled(path: str, text: str, values: Values) -> str:
    text = _REFERENCE.sub(lambda found: str(_referred(path, found, values)), text)
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{path}: has more than {_MAX_CHARACTERS} characters with its references put in")
    return text


def _referred(path: str, reference: re.Match[str], values: Values) -> Any:
    """The value of a key; the reference itself if the file has no such key."""
    name, _, default = reference[1].removeprefix(_SELECT).partition(",")
    num_dots = len(name) - len(name.lstrip("."))
    above = path.split(".")[:-num_dots] if num_dots else []
    name = ".".join([*above, name.strip(". ")])
    if name in values:
        return values[name][1]
    return _number(_loaded(default, path)) if reference[1].startswith(_SELECT) and default else reference[0]


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """A line with the variables that the script sets itself, and with products of numbers."""
    line = re.sub(
        r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
        lambda found: variables.get(found[1] or found[3], found[2] or found[0]),
        line,
    )
    return re.sub(r"\$\(\(([\d* ]+)\)\)", lambda found: str(prod(map(int, found[1].split("*")))), line)


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, hydra as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _flat(tree: Mapping[str, Any], whole: Collection[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in whole:
            yield from _flat(value, whole, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _lines_of_toml(text: str, whole: Collection[str]) -> dict[str, int]:
    section, lines = "", {}
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[([\w.]+)\]", line):
            section = f"{found[1]}."
            if found[1].rpartition(".")[2] in whole:
                lines[found[1]] = number
        elif found := re.match(r"\s*([\w.]+)\s*=", line):
            lines[section + found[1]] = number
    return lines
