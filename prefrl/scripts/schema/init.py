"""`prefrl init`: print a YAML file for an algorithm, with comments, to fill in and run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.errors import ConfigError
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.schema.help import GROUPS, kind_of
from prefrl.scripts.schema.parser import options_of

_USAGE = "usage: prefrl init ALGORITHM > run.yaml"
_WIDTH = 100
# What a first run has to set; everything else is a comment.
_FILLED = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "data.jsonl",
    "reward_funcs": ["numeric_reward"],
    "max_steps": 100,
}


def main(argv: Sequence[str]) -> int:
    """Print the file for the algorithm that the command line names."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\nPrint a commented YAML file of options. Algorithms: {', '.join(REGISTRY)}.")
        return 0
    if len(argv) != 1:
        raise ConfigError(f"{len(argv)} arguments: give one, the algorithm. {_USAGE}")
    if argv[0] not in REGISTRY:
        raise ConfigError(f"{argv[0]!r} is not an algorithm. {nearest(argv[0], REGISTRY)}")
    print(_text(argv[0]))
    return 0


def _text(algorithm: str) -> str:
    by_name = {option["name"]: option for option in options_of(algorithm)}
    blocks = [
        f"# prefrl {algorithm} run.yaml\n# Dataset: {REGISTRY[algorithm].dataset}.\n# Options on the command line "
        f"take precedence; prefrl {algorithm} --help WORD searches all of them."
    ]
    filled = {**_FILLED, "output_dir": f"runs/{algorithm}"}
    for group, names in GROUPS.items():
        entries = [_entry(by_name[name], filled) for name in names if name in by_name]
        if entries:
            blocks.append("\n".join([f"# ---- {group} ----", *entries]))
    return "\n\n".join(blocks)


def _entry(option: Mapping[str, Any], filled: Mapping[str, Any]) -> str:
    name = option["name"]
    about = textwrap.wrap(option.get("help", ""), _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if name in filled:
        return "\n".join([*about, f"{name}: {json.dumps(filled[name])}"])
    return "\n".join([*about, f"#{name}: {json.dumps(option.get('default'))}  # {kind_of(option)}"])
