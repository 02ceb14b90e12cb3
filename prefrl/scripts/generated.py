"""Writes what the command knows of other libraries into data files: `python -m prefrl.scripts.generated`.

The command reads `huggingface.json`, HuggingFace's options, instead of transformers, whose import takes seconds.
Messages about unknown options read `foreign.json`, what names of other libraries are here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from prefrl.options.base import BaseOptions
from prefrl.options.names import FOREIGN_FILE
from prefrl.options.training import AUTOMATIC
from prefrl.scripts.migrate.cosmos_rl import COSMOS_RL
from prefrl.scripts.migrate.ludwig import LUDWIG
from prefrl.scripts.migrate.others import AXOLOTL, MS_SWIFT, OTHERS
from prefrl.scripts.migrate.rows import TRANSFORMERS, TRL, Counterpart
from prefrl.scripts.migrate.verl import VERL_SFT
from prefrl.scripts.migrate.verl_keys import VERL
from prefrl.scripts.parsing.option_parser import form_of
from prefrl.scripts.schema import HUGGINGFACE_FILE
from prefrl.trainer.base_config import KNOWN_OPTIMIZERS
from prefrl.trainer.scheduler import SCHEDULE_NAMES

_KINDS = {"int": "int", "float": "float", "string_to_bool": "bool"}
# Help for options of transformers that most runs set, and for those with which prefrl does something else.
_HELP = {
    "output_dir": "Folder of the run, for its model, checkpoints and logs.",
    "max_steps": "Number of optimizer steps. With -1, num_train_epochs decides.",
    "num_train_epochs": "Number of passes over the training data. max_steps overrides it.",
    "per_device_train_batch_size": "Rows of a micro-batch on each process.",
    "gradient_accumulation_steps": "Micro-batches of an optimizer step.",
    "bf16": "Train in mixed precision with bfloat16.",
    "seed": "Seed of everything random. The order of the data has its own if data_seed is set.",
    "report_to": "Trackers that get the metrics, such as wandb or tensorboard.",
    "eval_strategy": "When to evaluate.",
    "eval_steps": "Optimizer steps between evaluations. It goes with eval_strategy='steps'. The default is "
    "logging_steps.",
    "save_steps": "Optimizer steps between checkpoints. A value below 1 is a fraction of all steps.",
    "resume_from_checkpoint": "Checkpoint to resume from: a folder, a URL, or true for the last one. The last "
    "complete one in output_dir is meant; if there is none, training starts at step 0.",
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


# Names of verl and cosmos-rl are paths of keys. The first library that has a name is the one that is meant.
LIBRARIES: dict[str, Mapping[str, Counterpart]] = {
    **{"TRL": TRL, "verl": VERL, "cosmos-rl": COSMOS_RL},
    **{"verl's SFT trainer": VERL_SFT, "Ludwig": LUDWIG, "axolotl": AXOLOTL},
    "ms-swift": MS_SWIFT,
    **{"transformers": TRANSFORMERS, "others": OTHERS},
}


def foreign_text() -> str:
    """The content of `foreign.json`: what `prefrl.options.names` reads of the tables, a line for each name."""
    libraries = [
        (library, _object((name, _told(row)) for name, row in rows.items())) for library, rows in LIBRARIES.items()
    ]
    return _object(libraries) + "\n"


def _told(row: Counterpart) -> str:
    return json.dumps([row.options[0] if row.options else "", row.says])


def _object(items: Iterable[tuple[str, str]]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in items) + "\n}"


if __name__ == "__main__":
    HUGGINGFACE_FILE.write_text(huggingface_text(), encoding="utf-8")
    FOREIGN_FILE.write_text(foreign_text(), encoding="utf-8")
