"""`prefrl migrate`: rewrite scripts and configs of TRL, verl, cosmos-rl and Ludwig."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, opt
from prefrl.options.names import nearest
from prefrl.registry import REGISTRY
from prefrl.scripts.declaration import CommandParser
from prefrl.scripts.migrate.cosmos_rl import migrate_cosmos_rl
from prefrl.scripts.migrate.edits import Migrated
from prefrl.scripts.migrate.ludwig import migrate_ludwig
from prefrl.scripts.migrate.python import migrate_script
from prefrl.scripts.migrate.trl import migrate_commands, migrate_trl_yaml
from prefrl.scripts.migrate.values import library_of
from prefrl.scripts.migrate.verl import migrate_verl
from prefrl.scripts.parsing.option_parser import BOOLEANS
from prefrl.scripts.parsing.yaml_file import parse_yaml

Library = Literal["trl", "verl", "cosmos_rl", "ludwig"]
_YAML = (".yaml", ".yml")


@dataclass
class MigrateArguments:
    """What becomes of the files."""

    source: Library | None = field(
        default=None,
        metadata={
            "aliases": ["--from"],
            "help": "Library that the files were written for. By default, it is detected from each file.",
        },
    )
    algorithm: str | None = opt(
        None,
        "Algorithm that YAML files of TRL are for, such as grpo. The default is the only algorithm that has all "
        "of their options.",
    )
    diff: bool = opt(False, "Only print the changes.")
    in_place: bool = opt(False, "Rewrite the files, and keep the old ones as FILE.orig.")
    output: str | None = opt(
        None, "File to write to, if only one is migrated. The default is FILE with _prefrl before its ending."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.algorithm is not None and self.algorithm not in REGISTRY:
            raise ConfigError(f"algorithm={self.algorithm!r}: {nearest(self.algorithm, [*REGISTRY])}")
        if self.diff + self.in_place + (self.output is not None) > 1:
            raise ConfigError("diff, in_place, output: set one of them")


def main(argv: Sequence[str]) -> int:
    """Migrate files, and print what was changed and what is left to do. Files and options come in any order."""
    description = (
        "Rewrite Python and shell scripts, YAML and TOML of TRL, verl, cosmos-rl and Ludwig for prefrl. "
        "The exit code is 0 if all is done, 3 if something is left to do, and 2 for an error.\n\nExamples:\n"
        "  prefrl migrate train.py --diff\n  prefrl migrate job.sh recipe.yaml --in_place"
    )
    parser = CommandParser("migrate FILE ...", (MigrateArguments,), description, takes_config=False)
    names, words = _files_and_options(argv)
    (options,) = parser.parse(words)
    if not names:
        raise ConfigError("no files: the command is prefrl migrate FILE ... [--diff] [--in_place] [--output FILE]")
    if options.output is not None and len(names) > 1:
        raise ConfigError(f"output={options.output!r}: one file for {len(names)}. Leave it out.")
    has_yaml = options.source in (None, "trl") and any(name.endswith((".yaml", ".yml")) for name in names)
    if options.algorithm is not None and not has_yaml:
        raise ConfigError(f"algorithm={options.algorithm!r}: only YAML files of TRL need it. Leave it out.")
    return 3 if sum(_migrate(Path(name), options) for name in names) else 0


def _files_and_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are files, and the options with their values.

    A switch takes the word after it only if that says yes or no.
    """
    switches = ("--diff", "--in_place", "--in-place", "-h", "--help", "--help_all", "--help-all")
    files: list[str] = []
    options: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        options.append(word)
        if rest and "=" not in word and (word not in switches or rest[0].lower() in BOOLEANS):
            options.append(rest.pop(0))
    return files, options


def _migrate(file: Path, options: MigrateArguments) -> int:
    """Migrate a file, and return how much is left to do."""
    text = _read(file)
    try:
        source = options.source or _source_of(file, text)
        result = _migrated(file, text, source, options.algorithm)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (SyntaxError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as {file.suffix or 'a script'}: {error}") from error
    except (MemoryError, RecursionError) as error:
        raise ConfigError(f"{file}: an expression is nested too deeply to be read. Simplify it.") from error
    target = _target(file, source, options)
    if result.text == text and not result.open:
        print(f"{file}: nothing to change")
    if result.text != text:
        print("".join(_diff(file, target, text, result.text)), end="")
        if not options.diff:
            _write(file, target, text, result.text)
    for line, said in result.changes:
        print(f"{file}:{line}: {said}")
    for line, said in result.open:
        print(f"{file}:{line}: to do: {said}")
    return len(result.open)


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if file.suffix in _YAML:
        parse_yaml(text, file, str(file))
    return text


def _source_of(file: Path, text: str) -> Library:
    if file.suffix == ".toml":
        return "cosmos_rl"
    if file.suffix in _YAML:
        return library_of(text) or "trl"
    return "verl" if file.suffix != ".py" and "verl.trainer" in text else "trl"


def _migrated(file: Path, text: str, source: Library, algorithm: str | None) -> Migrated:
    is_yaml = file.suffix in _YAML
    if source == "cosmos_rl":
        return migrate_cosmos_rl(text)
    if source == "ludwig":
        return migrate_ludwig(text)
    if source == "verl":
        return migrate_verl(text, is_command=not is_yaml)
    if is_yaml:
        return migrate_trl_yaml(text, algorithm)
    return migrate_script(text) if file.suffix == ".py" else migrate_commands(text)


def _target(file: Path, source: Library, options: MigrateArguments) -> Path:
    if options.output is not None:
        return Path(options.output)
    suffix = file.suffix if source == "trl" else ".yaml"
    if options.in_place and suffix == file.suffix:
        return file
    return file.with_name(f"{file.stem}_prefrl{suffix}")


def _diff(file: Path, target: Path, old: str, new: str) -> list[str]:
    before = old if file.suffix == target.suffix else ""  # of another format there is only what is new
    lines = difflib.unified_diff(before.splitlines(True), new.splitlines(True), str(file), str(target))
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]


def _write(file: Path, target: Path, old: str, new: str) -> None:
    if target == file:
        backup = file.with_name(f"{file.name}.orig")
        if backup.exists():
            raise ConfigError(f"{backup} exists already. Move it away, or leave out --in_place.")
        backup.write_text(old, encoding="utf-8")
    target.write_text(new, encoding="utf-8")
    print(f"{target}: written")
