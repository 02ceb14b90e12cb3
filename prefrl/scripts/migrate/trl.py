"""`prefrl migrate` for TRL's options, in its YAML files and in commands of shell scripts, comments and docstrings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import (
    Edit,
    Migrated,
    accepted,
    applied,
    converted,
    every_option,
    option_names_of,
    other_names,
    switches,
)
from prefrl.scripts.migrate.rows import DEFAULTS, LENIENT, SAME_VALUES, TRANSFORMERS, TRL, VALUES

NAMES = {**TRANSFORMERS, **TRL}
UNKNOWN = object()  # a value that is known only when the file runs


@dataclass(frozen=True)
class OptionChange:
    """What becomes of an option.

    Args:
        name: The option as TRL has it.
        kind: Another name for the same value, other options, a comment in its place, or nothing.
        says: Why, in words that may follow the name.
        options: The options in its place. They may be none.
    """

    name: str
    kind: Literal["rename", "replace", "comment", "keep"]
    says: str
    options: Mapping[str, Any]

    @property
    def is_open(self) -> bool:
        """Whether something is left to do."""
        return self.kind in ("comment", "keep")


def config_name_of(command: str) -> str:
    """The name of the config of an algorithm."""
    return REGISTRY[command].config.partition(":")[2]


def steps_of(
    config: str | None, known: Collection[str], values: Mapping[str, Any], *, starts_server: bool = True
) -> list[OptionChange]:
    """What becomes of the options that prefrl does not take as they are.

    Args:
        config: The name of the config; None: other options than those of prefrl are no mistake.
        known: The options that there are.
        values: Those that are given.
        starts_server: Whether they are those of a command, which starts a server that shares the GPU.
    """
    steps: list[OptionChange] = []
    given = {name for name in values if name in known}
    for name, value in values.items():
        if name == "use_vllm":
            step = _of_server(name, values, starts_server=starts_server)
        elif name in known:
            step = _known(config, name, values)
        else:
            step = _unknown(config, name, value, values, known)
        if step is not None and step.kind in ("rename", "replace"):
            taken = step.options.keys() & given - {name}
            given |= step.options.keys()
            if taken:
                step = OptionChange(name, "keep", f"{step.says}; {', '.join(sorted(taken))} is given, too", {})
        if step is not None:
            steps.append(step)
    return steps


def missing_defaults(config: str, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What TRL takes for options that are not given, where the default differs.

    Args:
        config: The name of the config.
        values: The options that are given.
        own: Defaults of the class of TRL, where that is another one.
    """
    own = own or {}
    defaults = {**own, **DEFAULTS.get(config, {}), **own}
    defaults = {**defaults, **{name: LENIENT[name] for name in LENIENT.keys() & accepted(config) if defaults}}
    off = {name for name, needs in switches().items() if any(values.get(switch) is not True for switch in needs)}
    given = {*values, *(option for name, option in other_names(config).items() if name in values)}
    missing = {name: value for name, value in defaults.items() if name not in given and name not in off}
    if values.get("fp16", False) is not False:
        missing.pop("bf16", None)
    if config == "GRPOConfig" and values.get("beta", 0.0) != 0.0 and "use_bias_correction_kl" not in values:
        missing["use_bias_correction_kl"] = True
    return missing


def say_written(missing: Mapping[str, Any], values: Mapping[str, Any], shown: str) -> str:
    """What to say about defaults that are written into a file."""
    needs_gpu = missing.get("bf16") and values.get("use_cpu") is not True
    note = ". Rows that cannot be used are left out" if LENIENT.keys() & missing.keys() else ""
    note += ". bf16 needs a GPU that has it, or use_cpu, as in TRL; on others, set it to false" if needs_gpu else ""
    return f"TRL's defaults are written out: {shown}{note}"


def _known(config: str | None, name: str, values: Mapping[str, Any]) -> OptionChange | None:
    """An option of prefrl whose value has another name or meaning."""
    value = values[name]
    ours = VALUES.get((str(config), name, str(value)))
    if ours is not None:
        return OptionChange(name, "replace", f"{value!r} is {ours!r} here", {name: ours})
    if name in SAME_VALUES and SAME_VALUES[name] == value:
        return OptionChange(name, "replace", f"{value!r} is not needed here", {})
    is_cispo = config == "GRPOConfig" and values.get("loss_type") == "cispo" and values.get("epsilon") != 1.0
    if is_cispo and name == "epsilon":
        return OptionChange(name, "replace", "is 1.0 for TRL's cispo, which has no lower bound", {"epsilon": 1.0})
    if is_cispo and name == "epsilon_high":
        return _bound_of_cispo(value, has_lower="epsilon" in values)
    if is_cispo and name == "loss_type" and "epsilon_high" not in values:
        return OptionChange(name, "keep", "'cispo': set epsilon=1.0, and epsilon_high to the bound of TRL minus 1", {})
    return None


def _of_server(name: str, values: Mapping[str, Any], *, starts_server: bool) -> OptionChange | None:
    """The switch of a server. Without a mode, TRL's is that of a shared GPU, which is written out with the switch."""
    value, mode = values[name], values.get("vllm_mode")
    if value is False or mode == "server":
        return None
    if not starts_server:
        says = (
            "with vllm_mode 'colocate', TRL's default: before the script, start prefrl vllm-serve --enable_sleep_mode "
            "on the same GPU, which the command prefrl grpo does by itself"
        )
        return OptionChange(name, "keep", says, {})
    if value is UNKNOWN and mode is None:
        return OptionChange(name, "keep", "without vllm_mode is 'colocate' in TRL: set vllm_mode", {})
    return None


def _bound_of_cispo(bound: Any, *, has_lower: bool) -> OptionChange:
    """TRL's bound of the ratio is epsilon_high itself, prefrl's is 1 + epsilon_high; nothing is cut off below."""
    if not isinstance(bound, int | float):
        return OptionChange("epsilon_high", "keep", "is relative to 1 here: subtract 1, and set epsilon=1.0", {})
    lower = {} if has_lower else {"epsilon": 1.0}
    says = "is relative to 1 here, and TRL's cispo has no lower bound"
    return OptionChange("epsilon_high", "replace", says, {**lower, "epsilon_high": bound - 1.0})


def _unknown(
    config: str | None, name: str, value: Any, values: Mapping[str, Any], known: Collection[str]
) -> OptionChange | None:
    """An option that prefrl does not have."""
    row = NAMES.get(name)
    if config == "OnlineDPOConfig" and name == "max_length":  # it is taken, but not listed
        return None
    if row is None:
        return None if config is None else OptionChange(name, "keep", f"is no option of {config}", {})
    if row.kind == "aside":
        return OptionChange(name, "comment", row.says, {})
    if row.may_go and row.convert is None:
        return OptionChange(name, "replace", row.says, {})
    if row.kind == "renamed" and row.options[0] in known and (value is UNKNOWN or row.convert is None):
        return OptionChange(name, "rename", row.says, {row.options[0]: value})
    options = row.says if value is UNKNOWN else converted(row, value)
    if isinstance(options, str):
        return OptionChange(name, "keep", f"{row.says}{options.removeprefix(row.text).removeprefix(row.says)}", {})
    if not options.keys() <= {*known}:
        return OptionChange(name, "keep", row.says, {})
    is_same = row.kind == "renamed" and [*options.values()] == [value]
    return OptionChange(name, "rename" if is_same else "replace", row.says, options)


def migrate_trl_yaml(text: str, algorithm: str | None = None) -> Migrated:
    """A YAML file for TRL's commands or scripts, with the names and values of prefrl; all else stays as it is.

    Args:
        text: The file.
        algorithm: The command of prefrl that reads the file; None: the only one that has the file's options.

    Raises:
        ConfigError: It has no options of TRL, the algorithm cannot be told, or the file is one line in braces.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError("the file must have an option in each line, as name: value")
    entries = {str(key.value): (key, value) for key, value in root.value}
    values = {name: yaml.safe_load(yaml.serialize(value)) for name, (_, value) in entries.items()}
    algorithm = algorithm or _algorithm_of(values)
    config = config_name_of(algorithm)
    result, lines = Migrated(text), text.splitlines(keepends=True)
    for step in steps_of(config, {*option_names_of(algorithm), "env"}, values):
        key, value = entries[step.name]
        _apply(step, lines, key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0))
        said = (key.start_mark.line + 1, f"{step.name} {step.says}")
        (result.open if step.is_open else result.changes).append(said)
        values.update(step.options)
    if missing := missing_defaults(config, values):
        written = yaml.safe_dump(missing, sort_keys=False)
        start = "" if text.endswith("\n") else "\n"
        lines += [start, "# TRL's defaults that differ from those of prefrl.\n", written]
        shown = ", ".join(written.splitlines())
        result.changes.append((len(lines), say_written(missing, values, shown)))
    result.text = "".join(lines)
    result.changes.sort()
    result.open.sort()
    return result


def _apply(step: OptionChange, lines: list[str], first: int, end: int) -> None:
    """Change the lines of an option, from the first to the one before the end; all other lines keep their places."""
    while end > first + 1 and lines[end - 1].lstrip()[:1] in ("", "#"):
        end -= 1  # the end of a list is the next option; what lies between belongs to that
    if step.kind == "rename":
        lines[first] = lines[first].replace(step.name, next(iter(step.options)), 1)
    elif step.kind == "replace":
        written = yaml.safe_dump(dict(step.options), sort_keys=False) if step.options else ""
        lines[first:end] = [written, *[""] * (end - first - 1)]
    elif step.kind == "comment":
        lines[first:end] = [f"# {line}" for line in lines[first:end]]
        lines[first] = f"# to do: {step.name} {step.says}\n{lines[first]}"


def _algorithm_of(names: Collection[str]) -> str:
    """The only algorithm of TRL that has all of these options."""
    if not {*names} & (every_option() | NAMES.keys()):
        raise ConfigError("no options of TRL are in this file")
    known = {name for name in names if name in every_option() - NAMES.keys()}
    commands = [command for command in REGISTRY if config_name_of(command) in DEFAULTS]
    fitting = [command for command in commands if known <= option_names_of(command)]
    if len(fitting) == 1:
        return fitting[0]
    which = f"they may be those of {', '.join(fitting)}" if fitting else "no algorithm has all of them"
    example = (fitting or commands)[0]
    raise ConfigError(
        f"the file's options do not tell its algorithm: {which}. Name it, for example --algorithm {example}"
    )


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
        """The options in a part of the text as they are afterwards."""
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
