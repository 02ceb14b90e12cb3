"""Rewrites YAML files of TRL: the options have the same places, so the file is edited."""

from __future__ import annotations

from collections.abc import Collection

import yaml

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate import options as trl_options
from prefrl.scripts.migrate.edits import Migrated, every_option, options_of
from prefrl.scripts.migrate.foreign.trl import DEFAULTS

__all__ = ["migrate_trl_yaml"]


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
    config = trl_options.config_of(algorithm)
    result, lines = Migrated(text), text.splitlines(keepends=True)
    for step in trl_options.steps_of(config, {*options_of(algorithm), "env"}, values):
        key, value = entries[step.name]
        _apply(step, lines, key.start_mark.line, value.end_mark.line + (value.end_mark.column > 0))
        said = (key.start_mark.line + 1, f"{step.name} {step.says}")
        (result.open if step.is_open else result.changes).append(said)
        values.update(step.options)
    if missing := trl_options.missing_defaults(config, values):
        written = yaml.safe_dump(missing, sort_keys=False)
        start = "" if text.endswith("\n") else "\n"
        lines += [start, "# TRL's defaults that differ from those of prefrl.\n", written]
        shown = ", ".join(written.splitlines())
        result.changes.append((len(lines), trl_options.say_written(missing, values, shown)))
    result.text = "".join(lines)
    result.changes.sort()
    result.open.sort()
    return result


def _apply(step: trl_options.Step, lines: list[str], first: int, end: int) -> None:
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
    if not {*names} & (every_option() | trl_options.NAMES.keys()):
        raise ConfigError("no options of TRL are in this file")
    known = {name for name in names if name in every_option() - trl_options.NAMES.keys()}
    commands = [command for command in REGISTRY if trl_options.config_of(command) in DEFAULTS]
    fitting = [command for command in commands if known <= options_of(command)]
    if len(fitting) == 1:
        return fitting[0]
    which = f"they may be those of {', '.join(fitting)}" if fitting else "no algorithm has all of them"
    example = (fitting or commands)[0]
    raise ConfigError(
        f"the file's options do not tell its algorithm: {which}. Name it, for example --algorithm {example}"
    )
