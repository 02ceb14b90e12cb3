"""Rewrites commands of TRL: `trl sft --eos_token ...` in shell scripts, comments and docstrings."""

from __future__ import annotations

import re
from collections.abc import Collection

import yaml

from prefrl.options.foreign.trl import TRL
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import Migrated, converted, options_of

__all__ = ["migrate_commands"]

_COMMAND = re.compile(r"(?<![\w./-])trl (\w[\w-]*)")
_PACKAGE = re.compile(r"""(["'])trl(\[[\w,-]*\])?( @ [^"']*|[=<>~!][^"']*)?\1""")
_FLAG = re.compile(r"""--([A-Za-z_][\w-]*)(?:(?:=|[ \t]+)(?!-)("[^"\n]*"|'[^'\n]*'|[^\s\\"'`]+))?""")
_INSTALL = re.compile(r"(?<=pip install )trl\b")


def migrate_commands(
    text: str, *, first_line: int = 1, of_script: Collection[str] | None = None, needs_trl: bool = False
) -> Migrated:
    """The text with `prefrl` commands and their options in place of TRL's.

    Args:
        text: A shell script, a comment, or a docstring.
        first_line: The number of its first line.
        of_script: The options of the Python script that it is a part of, whose flags may stand anywhere.
        needs_trl: Whether trl must stay installed.
    """
    result = Migrated(text)
    lines = text.split("\n")
    new: list[str] = []
    known = of_script
    for number, line in enumerate(lines, start=first_line):
        found = _COMMAND.search(line)
        if found is not None and (found[1] in REGISTRY or found[1] == "vllm-serve"):
            known = options_of(found[1]) if found[1] in REGISTRY else None
            line = _COMMAND.sub(r"prefrl \1", line)
            result.changes.append((number, f"trl {found[1]} is prefrl {found[1]}"))
        if not needs_trl:
            line = _PACKAGE.sub(_package, _INSTALL.sub("prefrl", line))
        changed = line if known is None else _flags(line, number, known, result)
        if changed.strip() not in ("", "\\") or line == changed:
            new.append(changed)
        elif new and not changed.strip():  # the command ended here
            new[-1] = new[-1].rstrip().removesuffix("\\").rstrip()
        if of_script is None and not line.rstrip().endswith("\\"):
            known = None
    result.text = "\n".join(new)
    return result


def _package(found: re.Match[str]) -> str:
    """The requirement with those of TRL's extras that prefrl has, without a version."""
    given = (found[2] or "[]")[1:-1].split(",")
    kept = ",".join(name for name in given if name in ("peft", "quantization", "deepspeed", "liger"))
    return f"{found[1]}prefrl{f'[{kept}]' if kept else ''}{found[1]}"


def _flags(line: str, number: int, known: Collection[str], result: Migrated) -> str:
    def replaced(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        row = TRL.get(name)
        if name in known or row is None:
            return match[0]
        said = f"--{name} {row.says}"
        if row.may_go:
            result.changes.append((number, f"removed: {said}"))
            return ""
        options = converted(row, yaml.safe_load((match[2] or "true").strip("\"'")))
        if isinstance(options, str) or not all(isinstance(value, str | int | float) for value in options.values()):
            result.open.append((number, said))
            return match[0]
        result.changes.append((number, said))
        return " ".join(f"--{option} {value}" for option, value in options.items())

    changed = _FLAG.sub(replaced, line)
    return line if changed == line else re.sub(r"(?<=\S) {2,}", " ", changed).rstrip(" ")
