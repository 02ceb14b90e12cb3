"""Rewrites commands of TRL: `trl sft --eos_token ...` in shell scripts, comments and docstrings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import Edit, Migrated, applied, every_option, option_names_of
from prefrl.scripts.migrate.trl import NAMES, UNKNOWN, config_name_of, missing_defaults, say_written, steps_of

__all__ = ["migrate_commands"]

# What runs TRL: trl sft; -m trl.scripts.sft, -m trl sft or trl/scripts/sft.py after python, accelerate launch and the
# like. Last, scripts that may be migrated ones.
_COMMAND = re.compile(
    r"(?<![\w./$-])trl[ \t]+(?P<command>[a-z][\w-]*)"
    r"|(?<!\S)(?:-m|--module)[ \t]+trl(?:\.cli(?:\.main)?)?[ \t]+(?P<of_package>[a-z][\w-]*)"
    r"|(?<!\S)(?:-m|--module)[ \t]+trl\.scripts\.(?P<of_module>\w+)"
    r"|(?<!\S)(?:[^\s\"']*/)?trl/scripts/(?P<of_file>\w+)\.py"
    r"|(?<!\S)[^\s\"']+\.py(?=\s)"
)
# What a command goes on with: blanks, escaped line ends, and words with what is quoted in them.
_GAP = re.compile(r"(?:[ \t]|\\\n)+")
_WORD = re.compile(
    r"""(?!\#)(?:[^\s\\"'`;|&<>()]|\\[^\n]|"(?:\\.|[^"\\])*"|'[^']*'|`[^`]*`|\$\([^()]*\))+""", re.DOTALL
)
_FLAG = re.compile(r"""--([A-Za-z_][\w-]*)(?:(?:=|[ \t]+)(?!-[A-Za-z-])("[^"\n]*"|'[^'\n]*'|[^\s\\"'`]+))?""")
_PACKAGE = re.compile(r"""(["']|(?<=pip install ))trl(\[[\w,-]*\])?( @ [^"']*|[=<>~!][^"'\s]*)?(\1|(?=\s|$))""")
_MENTION = re.compile(
    r"(?m)^(?![ \t]*#).*?(?<![\w-])"
    r"(?:trl[ \t]+[a-z]|trl[./](?:scripts|examples|cli)\b|(?:import|from)[ \t]+trl\b|install\b.*[ \t]trl\b)"
)


@dataclass(frozen=True)
class _Command:
    """A command: where it is, where its options are, and what it runs.

    Args:
        head: Where it begins.
        start: Where its options begin.
        end: Where they end.
        name: The command of prefrl; None: a script.
        words: What replaces its head.
    """

    head: int
    start: int
    end: int
    name: str | None
    words: str


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
    script = _Shell(text, first_line)
    for command in _commands(text):
        if command.name is not None:
            script.rename(command)
        if of_script is None:
            script.change(command)
    if of_script is not None:
        script.change_flags(0, len(text), None, of_script)
    result = script.migrated()
    if not needs_trl:
        result.text = _PACKAGE.sub(_package, result.text)
    if of_script is None:
        for found in _MENTION.finditer(result.text):
            line = first_line + result.text.count("\n", 0, found.end())
            result.open.append((line, "trl is still named here: call prefrl, or a script that is migrated"))
    result.changes.sort()
    result.open.sort()
    return result


def _commands(text: str) -> Iterator[_Command]:
    end = 0
    for found in _COMMAND.finditer(text):
        name = next((name for name in found.groups() if name), None)
        name = name and name.replace("vllm_serve", "vllm-serve")
        if found.start() < end or (name is not None and name not in (*REGISTRY, "vllm-serve", "env")):
            continue
        end = _end(text, found.end())
        words = f"prefrl {name}" if found["command"] else f"-m prefrl.scripts.main {name}"
        yield _Command(found.start(), found.end(), end, name, words)


def _end(text: str, start: int) -> int:
    """Where the words end that begin here."""
    while (gap := _GAP.match(text, start)) and (word := _WORD.match(text, gap.end())):
        start = word.end()
    return start


class _Shell:
    """A text with commands, and the edits that it needs."""

    def __init__(self, text: str, first_line: int) -> None:
        self.text, self.first_line = text, first_line
        self.result = Migrated(text)
        self.edits: list[Edit] = []

    def migrated(self) -> Migrated:
        self.result.text = applied(self.text, self.edits, str)
        return self.result

    def rename(self, command: _Command) -> None:
        """The words that start the command."""
        old, words = self.text[command.head : command.start], self.text[command.start : command.end]
        said = f"{old} is {command.words}"
        if command.words.startswith("prefrl") and command.name in REGISTRY and "--num_processes" not in words:
            said += ", which is one process unless num_processes is set; trl starts one for each GPU"
        self._edit(command.head, command.start, command.words)
        self._say(command.head, said)

    def change(self, command: _Command) -> None:
        """The options of a command of a shell script."""
        if command.name is None:
            for match in self._flags(command.start, command.end):
                name = _name(match)
                if name in NAMES and name not in every_option():
                    said = f"--{name} {NAMES[name].says}, if this script is migrated"
                    self._say(match.start(), said, is_open=True)
        elif command.name == "vllm-serve":
            for match in self._flags(command.start, command.end):
                if _name(match) == "vllm_model_impl":
                    self._edit(match.start(), match.end(1), "--model-impl")
                    self._say(match.start(), f"{match[1]} is vLLM's --model-impl")
        elif command.name in REGISTRY:
            config = config_name_of(command.name)
            values = self.change_flags(command.start, command.end, config, option_names_of(command.name), command.head)
            self._write_defaults(command, config, values)

    def change_flags(
        self, start: int, end: int, config: str | None, known: Collection[str], head: int | None = None
    ) -> Mapping[str, Any]:
        """The options in a part of the text as they are afterwards.

        Args:
            start: Where the part begins.
            end: Where it ends.
            config: See `prefrl.scripts.migrate.trl.steps_of`.
            known: The options that there are.
            head: Where the command begins, if comments may stand above it.
        """
        flags = {_name(match): match for match in self._flags(start, end)}
        values = {name: _value(match[2]) for name, match in flags.items()}
        for step in steps_of(config, {*known, "config"}, values):
            match = flags[step.name]
            is_kept = step.kind == "keep" or (step.kind == "comment" and head is None)
            if step.kind == "rename":
                self._edit(match.start(), match.end(1), f"--{next(iter(step.options))}")
            elif not is_kept and step.options:
                self._edit(match.start(), match.end(), _words(step.options))
            elif not is_kept:
                gap = re.search(r"(?:[ \t]|\\\n)*$", self.text[: match.start()])
                self._edit(match.start() - len(gap[0] if gap else ""), match.end(), "")
            if step.kind == "comment" and head is not None:
                self._comment(head, f"to do: {match[0]} {step.says}")
            self._say(match.start(), f"--{step.name} {step.says}", is_open=step.is_open)
            values.update(step.options)
        return values

    def _write_defaults(self, command: _Command, config: str, values: Mapping[str, Any]) -> None:
        """Before the options that are given, so that those in variables override them."""
        words = self.text[command.start : command.end]
        if "$" in _FLAG.sub("", words):
            self._say(command.head, "options in variables were not looked at", is_open=True)
        if "config" in values:
            file = next(match[2] for match in self._flags(command.start, command.end) if _name(match) == "config")
            said = (
                f"prefrl migrate {file} --algorithm {command.name} writes TRL's defaults; give its result to --config"
            )
            self._say(command.head, said, is_open=True)
            return
        missing = missing_defaults(config, values)
        if not missing:
            return
        line = re.search(r"\\\n([ \t]*)", words)
        between = " " if line is None else f" \\\n{line[1]}"
        self._edit(command.start, command.start, between + _words(missing))
        self._say(command.head, say_written(missing, values, _words(missing)))

    def _comment(self, head: int, text: str) -> None:
        """A line above the first line of a command."""
        start = self.text.rfind("\n", 0, head) + 1
        while self.text[:start].endswith("\\\n"):
            start = self.text.rfind("\n", 0, start - 1) + 1
        self._edit(start, start, f"# {text}\n")

    def _flags(self, start: int, end: int) -> Iterator[re.Match[str]]:
        return _FLAG.finditer(self.text, start, end)

    def _edit(self, start: int, end: int, text: str) -> None:
        self.edits.append(Edit(start, end, text))

    def _say(self, place: int, text: str, *, is_open: bool = False) -> None:
        line = self.first_line + self.text.count("\n", 0, place)
        (self.result.open if is_open else self.result.changes).append((line, text))


def _name(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")


def _value(text: str | None) -> Any:
    """The value that a word of the command line stands for."""
    if text is None:
        return True
    if "$" in text or "`" in text:
        return UNKNOWN
    plain = text.strip("\"'")
    try:
        return yaml.safe_load(plain)
    except yaml.YAMLError:
        return plain


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {_word(value)}" for name, value in values.items())


def _word(value: Any) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def _package(found: re.Match[str]) -> str:
    """The requirement with those of TRL's extras that prefrl has, without a version."""
    given = (found[2] or "[]")[1:-1].split(",")
    kept = ",".join(name for name in given if name in ("peft", "quantization", "deepspeed", "liger"))
    return f"{found[1]}prefrl{f'[{kept}]' if kept else ''}{found[4]}"
