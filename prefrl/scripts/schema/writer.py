"""Writes huggingface.json, HuggingFace's options and what they take: `python -m prefrl.scripts.schema.writer`.

The command reads that file instead of transformers, whose import takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from prefrl.options.base import BaseOptions
from prefrl.options.training import AUTOMATIC
from prefrl.scripts.parsing.option_parser import form_of
from prefrl.scripts.schema.parser import HUGGINGFACE_FILE
from prefrl.trainer.base_config import KNOWN_OPTIMIZERS
from prefrl.trainer.scheduler import SCHEDULE_NAMES

_KINDS = {"int": "int", "float": "float", "string_to_bool": "bool"}
# Help for options of transformers with which prefrl does something else.
_HELP = {
    "resume_from_checkpoint": "Checkpoint to resume from: a folder, a URL, or true for the last complete one in "
    "output_dir; if there is none, training starts at step 0.",
    "disable_tqdm": "Show one line for each log instead of the live view.",
}


def huggingface_text() -> str:
    """The content of huggingface.json: each option in a line; and the names of optimizers and schedules."""
    parser: Any = HfArgumentParser(TrainingArguments)
    actions = {action.dest: action for action in reversed(parser._actions)}
    own = {field.name for field in dataclasses.fields(BaseOptions)}
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    options = ",\n".join(
        json.dumps({"name": name} if name in own else _entry(actions[name], parser)) for name in names
    )
    known = {"optimizers": KNOWN_OPTIMIZERS, "schedules": SCHEDULE_NAMES}
    rest = "".join(f",\n{json.dumps(name)}: {json.dumps(values)}" for name, values in known.items())
    return f'{{"options": [\n{options}\n]{rest}}}\n'


def _entry(action: argparse.Action, parser: Any) -> dict[str, Any]:
    """An option as `OptionParser.add_option` takes it. What is false or empty is left out."""
    name = action.dest
    entry = {
        "name": name,
        "kind": _KINDS.get(str(getattr(action.type, "__name__", "str")), "str"),
        "help": _HELP.get(name, (action.help or "").replace("%%", "%")),
        "choices": None if action.choices is None else list(action.choices),
        "is_list": action.nargs == "+",
        "is_flag": action.nargs == "?",
        "is_required": action.required,
        "is_auto": name in AUTOMATIC,
        "has_no_form": isinstance(parser._option_string_actions.get(f"--no_{name}"), argparse._StoreFalseAction),
        **form_of(typing.get_type_hints(TrainingArguments)[name])._asdict(),
    }
    default = _plain(action.default)
    kept = {key: value for key, value in entry.items() if value not in (None, False, "", {}, [])}
    return kept if default is None else {**kept, "default": default}


def _plain(value: Any) -> Any:
    """A default as JSON has it; an enum by its value."""
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list) else None


if __name__ == "__main__":
    HUGGINGFACE_FILE.write_text(huggingface_text(), encoding="utf-8")
