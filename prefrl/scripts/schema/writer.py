"""Writes schema.json, the options of every algorithm: `python -m prefrl.scripts.schema.writer`.

The command reads that file instead of the configs, whose imports take seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from transformers import TrainingArguments

from prefrl.registry import REGISTRY, Algorithm
from prefrl.scripts.arguments.command import CommandArguments, RewardArguments
from prefrl.scripts.arguments.launch import LaunchArguments, ProcessArguments
from prefrl.scripts.parsing.argument_parser import ArgumentParser
from prefrl.scripts.schema.parser import SCHEMA_FILE
from prefrl.scripts.schema.rules import ParamsTable, rules_of
from prefrl.trainer.base.options.size import AUTOMATIC
from prefrl.trainer.grpo_presets import PRESETS

__all__ = ["parser_of", "schema_text"]

_KINDS = {
    "int": "int",
    "float": "float",
    "string_to_bool": "bool",
    "DatasetConfig": "dataset",
    "RewardEntry": "reward",
}
# Help for options of transformers with which prefrl does something else.
_HELP = {
    "resume_from_checkpoint": "Checkpoint to resume from: a folder, a URL, or true for the last complete one in "
    "output_dir; if there is none, training starts at step 0.",
    "disable_tqdm": "Show one line for each log instead of the live view.",
}
_LIMITS = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}


def parser_of(algorithm: Algorithm) -> ArgumentParser:
    """The parser for the options of `prefrl <algorithm>`, made from the classes themselves."""
    config_class = algorithm.load_config()
    fields = {field.name for field in dataclasses.fields(config_class)}
    script_class = RewardArguments if "reward_weights" in fields else CommandArguments
    launch_class = LaunchArguments if "use_vllm" in fields else ProcessArguments
    return ArgumentParser((script_class, config_class, launch_class))


def schema_text() -> str:
    """The content of schema.json: each option once; for each algorithm, the numbers of its options, and its rules."""
    numbers: dict[str, int] = {}
    algorithms = {}
    for name, algorithm in REGISTRY.items():
        entries = [json.dumps(entry, sort_keys=True) for entry in _options(algorithm)]
        algorithms[name] = [numbers.setdefault(entry, len(numbers)) for entry in entries]
    table = ParamsTable()
    rules = {name: rules_of(algorithm, table) for name, algorithm in REGISTRY.items()}
    options = ",\n".join(numbers)
    names = ",\n".join(f"{json.dumps(name)}: {json.dumps(places)}" for name, places in algorithms.items())
    params = ",\n".join(json.dumps(row) for row in table.rows())
    of_algorithms = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rules.items())
    parts = [f'"options": [\n{options}\n]', f'"algorithms": {{\n{names}\n}}']
    parts += [f'"params": [\n{params}\n]', f'"rules": {{\n{of_algorithms}\n}}']
    return "{" + ",\n".join(parts) + "}\n"


def _options(algorithm: Algorithm) -> list[dict[str, Any]]:
    parser, config_class = parser_of(algorithm), algorithm.load_config()
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    hints = {name: hint for cls in parser.dataclass_types for name, hint in _hints(cls).items()}
    options = [
        _entry(action, parser, hints, is_inherited=name in inherited)
        for name, action in reversed(parser._by_name.items())
    ]
    if hasattr(config_class, "preset"):
        text = "Options of a paper's algorithm; your own take precedence."
        options.append({"name": "preset", "kind": "str", "help": text, "choices": [*PRESETS], "is_nullable": True})
    return options


def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _entry(
    action: argparse.Action, parser: ArgumentParser, hints: Mapping[str, Any], *, is_inherited: bool
) -> dict[str, Any]:
    """An option as the schema has it. What is false or empty is left out."""
    name, is_hidden = action.dest, action.help == argparse.SUPPRESS
    form = parser._forms[name]
    entry = {
        "name": name,
        "kind": _KINDS.get(str(getattr(action.type, "__name__", "str")), "str"),
        "help": "" if is_hidden else _HELP.get(name, (action.help or "").replace("%%", "%")),
        "choices": None if action.choices is None else list(action.choices),
        "is_list": action.nargs == "+",
        "is_flag": action.nargs == "?",
        "is_required": action.required,
        "is_auto": name in AUTOMATIC,
        "is_hidden": is_hidden,
        "is_inherited": is_inherited,
        "has_no_form": isinstance(parser._option_string_actions.get(f"--no_{name}"), argparse._StoreFalseAction),
        "bounds": _bounds(hints.get(name)),
        **form._asdict(),
    }
    default = _plain(action.default)
    kept = {key: value for key, value in entry.items() if value not in (None, False, "", {}, [])}
    return kept if default is None else {**kept, "default": default}


def _plain(value: Any) -> Any:
    """A default as JSON has it; an enum by its value."""
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list) else None


def _bounds(hint: Any) -> dict[str, float]:
    """The bounds of a number in its type, which may also be None."""
    parts = (hint,) if typing.get_origin(hint) is Annotated else typing.get_args(hint)
    found = [part for part in parts if typing.get_origin(part) is Annotated]
    limits = [limit for part in found for limit in typing.get_args(part)[1:] if type(limit) in _LIMITS]
    return {_LIMITS[type(limit)]: getattr(limit, _LIMITS[type(limit)]) for limit in limits}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
