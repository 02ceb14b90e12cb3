"""Rewrites Python scripts that use TRL: imports, names, keywords of configs and trainers, and commands in comments."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import prefrl
from prefrl.options.names import ARGUMENTS, TRAINER_NAMES
from prefrl.registry import REGISTRY
from prefrl.scripts.arguments.datasets import DatasetMixtureConfig, ScriptArguments
from prefrl.scripts.arguments.model_config import ModelConfig
from prefrl.scripts.migrate import trl
from prefrl.scripts.migrate.edits import (
    Edit,
    Migrated,
    accepted,
    applied,
    every_option,
    option_names_of,
    parsed_options,
)
from prefrl.scripts.migrate.names import METHODS, NAMES, REWARDS, SAME_CLASSES, SCRIPT_OPTIONS
from prefrl.scripts.migrate.trl import migrate_commands

__all__ = ["migrate_script"]

_LINE = 119
_NAMESAKES = "trl.experimental.bema_for_ref_model"  # its names are those of other classes
_IMPORT = re.compile(rb"from\s+trl[\w.]*\s+import")


def migrate_script(text: str) -> Migrated:
    """The script with prefrl in place of TRL. Its formatting and comments stay.

    Raises:
        SyntaxError: It is not Python.
    """
    return _Script(text).migrated()


def _home(name: str) -> str | None:
    """The module that has a public name of TRL here."""
    if name in prefrl.__all__:
        return "prefrl"
    return "prefrl.rewards" if name in REWARDS else None


class _Script:
    """One script and the edits that it needs."""

    def __init__(self, text: str) -> None:
        self.source = text.encode()
        self.tree = ast.parse(text)
        self.result = Migrated(text)
        self.edits: list[Edit] = []
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: dict[str, str] = {}  # names in the script -> those of TRL
        self.given: dict[str, Mapping[str, Any]] = {}  # names of configs in the script -> what TRL's class sets
        self.module: str | None = None  # what the script calls trl
        self.needs_trl = False  # whether it still imports something of trl
        self.own: list[str] = []  # options that no trainer reads, only the script

    def migrated(self) -> Migrated:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                self._import_from(node)
            elif isinstance(node, ast.Import):
                self._import(node)
        self.parsed = parsed_options(self.tree, self._name)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := self._name(node.func)) is not None:
                self._call(node, name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._attribute(node, node.value.id)
            for body in (getattr(node, field, None) for field in ("body", "orelse")):
                if isinstance(body, list):
                    self._methods(body)
        if self.names or self.module:
            self._parser()
            self._own_options()
            self._defaults_of_parsed_configs()
            self._texts()
        self.result.text = applied(self.source, self.edits, str.encode).decode()
        self.result.changes.sort()
        self.result.open.sort()
        return self.result

    # Imports.

    def _import_from(self, node: ast.ImportFrom) -> None:
        homes: dict[str, list[str]] = {}
        for alias in node.names:
            name, given, left = SAME_CLASSES.get(alias.name, (alias.name, {}, ""))
            self.given[alias.asname or alias.name] = given
            if left:
                self.result.open.append((node.lineno, f"{alias.name} is {name} here: {left}"))
            home = None if node.module == _NAMESAKES else _home(name)
            if home is None:
                self.needs_trl = True
                remedy = NAMES.get(alias.name, "it stays imported from trl")
                self.result.open.append((node.lineno, f"{alias.name} is not in prefrl: {remedy}"))
            else:
                self.names[alias.asname or alias.name] = name
            if name != alias.name and alias.asname is None:
                self._rename_class(alias.name, name)
            written = name if alias.asname is None else f"{name} as {alias.asname}"
            homes.setdefault(home or str(node.module), []).append(written)
        if homes.keys() == {node.module}:
            return
        start, end = self._span(node)
        if len(homes) == 1 and not any(alias.name in SAME_CLASSES for alias in node.names):
            found = _IMPORT.search(self.source, start, end)
            assert found is not None
            self._edit(found.start(), found.end(), f"from {next(iter(homes))} import")
        else:
            lines = [_import_line(home, names, node.col_offset) for home, names in sorted(homes.items())]
            self._edit(start, end, f"\n{' ' * node.col_offset}".join(lines))
        moved = ", ".join(name for home, names in homes.items() if home != node.module for name in names)
        self.result.changes.append((node.lineno, f"{moved}: imported from prefrl"))

    def _rename_class(self, name: str, ours: str) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id == name:
                self._edit(*self._span(node), ours)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] != "trl":
                continue
            used = {
                other.attr
                for other in ast.walk(self.tree)
                if isinstance(other, ast.Attribute)
                and isinstance(other.value, ast.Name)
                and other.value.id == (alias.asname or "trl")
            }
            missing = sorted(name for name in used if name != "rewards" and _home(name) != "prefrl")
            if missing:
                self.needs_trl = True
                self.result.open.append((node.lineno, f"trl.{missing[0]} is not in prefrl: {_remedy_of(missing[0])}"))
                continue
            start, _ = self._span(alias)
            self._edit(start, start + len("trl"), "prefrl")
            self.module = alias.asname or "trl"
            self.result.changes.append((node.lineno, "prefrl is imported in place of trl"))

    def _attribute(self, node: ast.Attribute, base: str) -> None:
        if self.module == "trl" and base == "trl":
            start, _ = self._span(node.value)
            self._edit(start, start + len("trl"), "prefrl")
        if self.parsed is not None and base in self.parsed.variables and self._of_other_class(node, base):
            return
        row = trl.NAMES.get(node.attr) if "args" in base or "config" in base else None
        is_user = bool(self.names or self.module)
        if row is None or not is_user or any(node.attr in accepted(name) for name in self.names.values()):
            return
        if row.kind == "renamed":
            _, end = self._span(node)
            self._edit(end - len(node.attr), end, row.options[0])
            self.result.changes.append((node.lineno, f"{base}.{node.attr}: it {row.says}"))
        else:
            self.result.open.append((node.lineno, f"{base}.{node.attr} {row.says}"))

    def _of_other_class(self, node: ast.Attribute, base: str) -> bool:
        """Whether a parsed dataclass lacks the option, but the config has it or the script gets it."""
        assert self.parsed is not None
        config = self.parsed.config
        variable = self.parsed.variable_of(config)
        if config is None or variable is None or node.attr in accepted(config):
            is_elsewhere = base != variable and node.attr not in _fields_of(self.parsed.variables[base])
            if config is None or variable is None or not is_elsewhere:
                return False
            start, _ = self._span(node.value)
            self._edit(start, start + len(base), variable)
            self.result.changes.append((node.lineno, f"{base}.{node.attr}: an option of {config} here"))
            return True
        if base == variable and node.attr in SCRIPT_OPTIONS:
            self.own += [] if node.attr in self.own else [node.attr]
            return True
        return False

    def _parser(self) -> None:
        """A parser of prefrl in the place of HuggingFace's, which knows fields alone and not TRL's names of keys."""
        if self.parsed is None or not accepted(str(self.parsed.config)):
            return
        found = [
            (node, alias)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module == "transformers"
            for alias in node.names
            if alias.name == "HfArgumentParser" and alias.asname is None
        ]
        if not found or not isinstance(self.parsed.parser, ast.Name) or self.parsed.parser.id != "HfArgumentParser":
            return
        ((node, alias),) = found[:1]
        line = f"from prefrl import ArgumentParser\n{' ' * node.col_offset}"
        start, end = self._span(node)
        if len(node.names) == 1:
            self._edit(start, end, line.rstrip())
        else:
            self._edit(start, start, line)
            start, end = self._whole(alias)
            if alias is node.names[-1]:  # with the comma before it
                start = self.source.rindex(b",", 0, start)
            self._edit(start, end, "")
        self._edit(*self._span(self.parsed.parser), "ArgumentParser")
        self.result.changes.append((self.parsed.parser.lineno, "prefrl's ArgumentParser also knows TRL's names"))

    def _own_options(self) -> None:
        """A config of the script's own, with the options that no trainer reads."""
        if not self.own or self.parsed is None or self.parsed.config is None:
            return
        config = self.parsed.classes[self.parsed.config]
        name = f"{self.parsed.config.removesuffix('Config')}ScriptConfig"
        statements = [node for node in self.tree.body if not _is_docstring_or_future(node)]
        used = next(node for node in statements if node.lineno <= config.lineno <= (node.end_lineno or 0))
        fields = "".join(f"    {option}: str | None = None\n" for option in self.own)
        start, _ = self._span(used)
        text = f'    """Options that only this script reads."""\n\n{fields}'
        old = self.source[slice(*self._span(config))].decode()
        self._edit(start, start, f"@dataclasses.dataclass\nclass {name}({old}):\n{text}\n\n")
        first, _ = self._span(statements[0])
        self._edit(first, first, "import dataclasses\n")
        self._edit(*self._span(config), name)
        self.result.changes.append((config.lineno, f"{name} has {', '.join(self.own)}, which no trainer reads"))

    def _methods(self, body: list[ast.stmt]) -> None:
        """Remove calls of methods that trainers need not have here."""
        for node in body:
            call = node.value if isinstance(node, ast.Expr) else None
            name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
            if name not in METHODS or not any(used.endswith("Trainer") for used in self.names.values()):
                continue
            start, end = self._span(node)
            line = self.source.rfind(b"\n", 0, start) + 1
            line -= self.source[:line].endswith(b"\n\n")  # with an empty line before it
            if len(body) == 1:
                self._edit(start, end, "pass")
            else:
                self._edit(line, min(end + 1, len(self.source)), "")
            self.result.changes.append((node.lineno, f"{name}() removed: {METHODS[name]}"))

    def _name(self, node: ast.expr) -> str | None:
        """The public name of TRL that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.module:
            return node.attr
        return None

    # Calls.

    def _call(self, node: ast.Call, name: str) -> None:
        if name.endswith("Trainer"):
            self._trainer(node, name)
        elif name.endswith("Config") and accepted(name):
            self._config(node, name)

    def _trainer(self, node: ast.Call, name: str) -> None:
        of_config = accepted(name.replace("Trainer", "Config"))
        for keyword in node.keywords:
            if keyword.arg is None or (name, keyword.arg) == ("PPOTrainer", "reward_model"):
                continue
            is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
            where = f"{name}({keyword.arg}=...)"
            if keyword.arg in TRAINER_NAMES:
                self._rename(keyword, TRAINER_NAMES[keyword.arg])
            elif keyword.arg in ARGUMENTS and not is_none:
                self.result.open.append((keyword.lineno, f"{where}: {ARGUMENTS[keyword.arg]}"))
            elif keyword.arg in of_config or keyword.arg in trl.NAMES:
                self.result.open.append((keyword.lineno, f"{where}: an option of {name.replace('Trainer', 'Config')}"))

    def _config(self, node: ast.Call, name: str) -> None:
        keywords = {keyword.arg: keyword for keyword in node.keywords if keyword.arg is not None}
        values = {option: _literal(keyword.value) for option, keyword in keywords.items()}
        if node.args:
            values["output_dir"] = _literal(node.args[0])
        removed: list[ast.expr | ast.keyword] = []
        for step in trl.steps_of(name, accepted(name), values, starts_server=False):
            keyword = keywords[step.name]
            said = f"{name}({step.name}=...) {step.says}"
            if step.kind == "rename":
                start, _ = self._span(keyword)
                self._edit(start, start + len(step.name), next(iter(step.options)))
            elif step.kind == "replace" and step.options:
                self._edit(*self._span(keyword), ", ".join(_assignments(step.options)))
            elif step.kind != "keep":
                removed.append(keyword)
            if step.kind == "comment":
                self._comment(node, keyword, f"to do: {_flat(self.source[slice(*self._span(keyword))])} {step.says}")
            (self.result.open if step.is_open else self.result.changes).append((keyword.lineno, said))
            values.update(step.options)
        self._replace(node, removed, self._defaults(node, name, values))

    def _comment(self, node: ast.Call, keyword: ast.keyword, text: str) -> None:
        """A comment in a line of its own above an argument of a call."""
        line = keyword.lineno
        for part in sorted(_arguments(node), key=lambda part: -part.lineno):
            if part.lineno < line <= (part.end_lineno or 0):
                line = part.lineno  # not inside another argument
        while self.source[: self.starts[line - 1]].endswith(b"\\\n"):
            line -= 1
        indent = re.compile(rb"[ \t]*").match(self.source, self.starts[line - 1])
        assert indent is not None
        self._edit(indent.start(), indent.start(), f"{indent[0].decode()}# {text}\n")

    def _defaults(self, node: ast.Call, name: str, values: dict[str, Any]) -> list[str]:
        """The arguments that say what TRL would have taken, where the default differs."""
        missing = trl.missing_defaults(name, values, self._set_by(node.func))
        parts = _assignments(missing)
        if parts and any(keyword.arg is None for keyword in node.keywords):
            text = f"{name}: TRL's defaults are {', '.join(parts)}, unless ** sets them"
            self.result.open.append((node.lineno, text))
            return []
        if parts:
            said = trl.say_written(missing, values, ", ".join(parts))
            self.result.changes.append((node.lineno, f"{name}: {said}"))
        return parts

    def _set_by(self, config: ast.expr | None) -> Mapping[str, Any]:
        """What TRL's class sets, by which the script makes a config, and the class of prefrl in its place does not."""
        return self.given.get(config.id, {}) if isinstance(config, ast.Name) else {}

    def _replace(self, node: ast.Call, removed: Collection[ast.expr | ast.keyword], added: list[str]) -> None:
        """Remove arguments of a call, and add others at its end."""
        given = sorted(_arguments(node), key=self._span)
        kept = [part for part in given if part not in removed]
        begin = self.source.index(b"(", self._span(node.func)[1]) + 1
        stop = self._span(kept[-1])[1] if kept else begin
        last = [part for part in given if part in removed and self._span(part)[0] >= stop]
        is_one_line = bool(last) and last[-1].end_lineno == (kept[-1].end_lineno if kept else node.lineno)
        for part in removed:
            if not (is_one_line and part in last):
                self._edit(*self._whole(part), "")
        if is_one_line:  # with the comma before them
            self._edit(stop, self._span(last[-1])[1], "")
        if not added:
            return
        if kept:
            self._add(node, kept[-1], added)
        else:
            self._edit(begin, begin, ", ".join(added))

    def _whole(self, part: ast.expr | ast.keyword | ast.alias) -> tuple[int, int]:
        """The place of an argument with the comma behind it, and its lines if nothing else is on them."""
        start, end = self._span(part)
        comma = re.compile(rb"[ \t]*,").match(self.source, end)
        end = end if comma is None else comma.end()
        line = self.source.rfind(b"\n", 0, start) + 1
        rest = re.compile(rb"[ \t]*(#[^\n]*)?\n").match(self.source, end)
        if rest is not None and not self.source[line:start].strip():
            return line, rest.end()
        blanks = re.compile(rb"[ \t]*").match(self.source, end)
        return start, end if comma is None or blanks is None or rest is not None else blanks.end()

    def _add(self, node: ast.Call, last: ast.expr | ast.keyword, parts: list[str]) -> None:
        """Add arguments after the last one, in lines of their own if it has its own."""
        start, stop = self._span(last)
        line = self.source[self.starts[last.lineno - 1] : start]
        if line.strip() or last.lineno == node.lineno:
            self._edit(stop, stop, ", " + ", ".join(parts))
            return
        indent = line.decode()
        rest = re.compile(rb"[ \t]*,?[ \t]*(#[^\n]*)?\n").match(self.source, stop, self._span(node)[1])
        if rest is None:  # the call ends in this line, or what is removed begins
            self._edit(stop, stop, "".join(f",\n{indent}{part}" for part in parts))
            return
        # The line's own comment stays behind its argument.
        if b"," not in rest[0].partition(b"#")[0]:
            self._edit(stop, stop, ",")
        self._edit(rest.end(), rest.end(), "".join(f"{indent}{part},\n" for part in parts))

    def _defaults_of_parsed_configs(self) -> None:
        """Give the parser TRL's defaults where they differ; if it has no name, say so."""
        statement = None if self.parsed is None else self.parsed.statement
        config = None if self.parsed is None else self.parsed.config
        class_of = {} if self.parsed is None else self.parsed.classes
        missing = trl.missing_defaults(str(config), {}, self._set_by(class_of.get(str(config))))
        if statement is not None and missing:
            parts = _assignments(missing)
            start, end = self._span(statement.targets[0])
            indent = f"\n{' ' * statement.col_offset}"
            call = f"{indent}{self.source[start:end].decode()}.set_defaults("
            line = f"{call}{', '.join(parts)})"
            if len(line) > _LINE:
                line = f"{call}{''.join(f'{indent}    {part},' for part in parts)}{indent})"
            _, end = self._span(statement)
            self._edit(end, end, line)
            said = trl.say_written(missing, {}, ", ".join(parts))
            self.result.changes.append((statement.lineno, f"{config}: {said}"))
            return
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        for node in ast.walk(self.tree):
            name = self._name(node) if isinstance(node, ast.Name) and node not in called else None
            if isinstance(node, ast.Name) and (missing := trl.missing_defaults(str(name), {})):
                shown = ", ".join(_assignments(missing))
                text = f"{name} is parsed from options, and some defaults differ; TRL's are {shown}"
                self.result.open.append((node.lineno, text))
                return

    # Comments and strings that stand alone.

    def _texts(self) -> None:
        known = every_option() if self.parsed is None else _options_of(self.parsed.config) | {*self.own}
        for line, start, end in [*self._comments(), *self._strings()]:
            old = self.source[start:end].decode()
            found = migrate_commands(old, first_line=line, of_script=known, needs_trl=self.needs_trl)
            if found.text != old:
                self._edit(start, end, found.text)
            self.result.changes += found.changes
            self.result.open += found.open

    def _comments(self) -> Iterator[tuple[int, int, int]]:
        lines = self.source.decode().splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(self.source.decode()).readline):
            if token.type == tokenize.COMMENT:
                line, column = token.start
                start = self.starts[line - 1] + len(lines[line - 1][:column].encode())
                yield line, start, start + len(token.string.encode())

    def _strings(self) -> Iterator[tuple[int, int, int]]:
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, *self._span(node.value)

    # Places.

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _edit(self, start: int, end: int, text: str) -> None:
        self.edits.append(Edit(start, end, text))

    def _rename(self, keyword: ast.keyword, name: str) -> None:
        assert keyword.arg is not None
        start, _ = self._span(keyword)
        self._edit(start, start + len(keyword.arg), name)
        self.result.changes.append((keyword.lineno, f"{keyword.arg} is {name} here"))


def _remedy_of(name: str) -> str:
    return NAMES.get(name, "trl stays imported")


def _options_of(config: str | None) -> frozenset[str]:
    """The options of the command whose config it is; those of all commands if there is none."""
    command = next((row.name for row in REGISTRY.values() if row.config.endswith(f":{config}")), None)
    return every_option() if command is None else option_names_of(command)


def _fields_of(name: str) -> frozenset[str]:
    """The options of a dataclass of ours."""
    plain = {cls.__name__: cls for cls in (DatasetMixtureConfig, ModelConfig, ScriptArguments)}
    return frozenset(vars(plain[name])["__dataclass_fields__"]) if name in plain else accepted(name)


def _is_docstring_or_future(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _import_line(module: str, names: list[str], indent: int) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) + indent <= _LINE:
        return line
    inner = textwrap.indent(",\n".join(names), " " * (indent + 4))
    return f"from {module} import (\n{inner},\n{' ' * indent})"


def _literal(node: ast.expr) -> Any:
    """The value of an expression, if it is a literal."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return trl.UNKNOWN


def _arguments(node: ast.Call) -> list[ast.expr | ast.keyword]:
    return [*node.args, *node.keywords]


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{option}={repr(value).replace(chr(39), chr(34))}" for option, value in values.items()]


def _flat(source: bytes) -> str:
    return " ".join(source.decode().split())
