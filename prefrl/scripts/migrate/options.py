"""What the options of a run of TRL are here, whatever file they stand in; its YAML files, which are edited.

Options have the same places in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from prefrl.errors import ConfigError
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import Migrated, converted, every_option, options_of, switches
from prefrl.scripts.migrate.foreign.trl import DEFAULTS, SAME_VALUES, TRANSFORMERS, TRL, VALUES

__all__ = ["NAMES", "UNKNOWN", "config_of", "missing_defaults", "say_written", "steps_of", "migrate_trl_yaml"]

NAMES = {**TRANSFORMERS, **TRL}
UNKNOWN = object()  # a value that is known only when the file runs


@dataclass(frozen=True)
class Step:
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


def config_of(command: str) -> str:
    """The name of the config of an algorithm."""
    return REGISTRY[command].config.partition(":")[2]


def steps_of(config: str | None, known: Collection[str], values: Mapping[str, Any]) -> list[Step]:
    """What becomes of the options that prefrl does not take as they are.

    Args:
        config: The name of the config; None: other options than those of prefrl are no mistake.
        known: The options that there are.
        values: Those that are given.
    """
    steps: list[Step] = []
    given = {name for name in values if name in known}
    for name, value in values.items():
        step = _known(config, name, values) if name in known else _unknown(config, name, value, values, known)
        if step is not None and step.kind in ("rename", "replace"):
            taken = step.options.keys() & given - {name}
            given |= step.options.keys()
            if taken:
                step = Step(name, "keep", f"{step.says}; {', '.join(sorted(taken))} is given, too", {})
        if step is not None:
            steps.append(step)
    return steps


def missing_defaults(config: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL takes for options that are not given, where the default differs.

    Args:
        config: The name of the config.
        values: The options that are given.
    """
    off = {name for name, needs in switches().items() if any(values.get(switch) is not True for switch in needs)}
    missing = {
        name: value for name, value in DEFAULTS.get(config, {}).items() if name not in values and name not in off
    }
    if values.get("fp16", False) is not False:
        missing.pop("bf16", None)
    if config == "GRPOConfig" and values.get("beta", 0.0) != 0.0 and "use_bias_correction_kl" not in values:
        missing["use_bias_correction_kl"] = True
    return missing


def say_written(missing: Mapping[str, Any], values: Mapping[str, Any], shown: str) -> str:
    """What to say about defaults that are written into a file."""
    needs_gpu = missing.get("bf16") and values.get("use_cpu") is not True
    note = ". bf16 needs a GPU that has it, or use_cpu, as in TRL; on others, set it to false" if needs_gpu else ""
    return f"TRL's defaults are written out: {shown}{note}"


def _known(config: str | None, name: str, values: Mapping[str, Any]) -> Step | None:
    """An option of prefrl whose value has another name or meaning."""
    value = values[name]
    ours = VALUES.get((str(config), name, str(value)))
    if ours is not None:
        return Step(name, "replace", f"{value!r} is {ours!r} here", {name: ours})
    if name in SAME_VALUES and SAME_VALUES[name] == value:
        return Step(name, "replace", f"{value!r} is not needed here", {})
    if name == "use_vllm" and value is not False and "vllm_mode" not in values:
        return Step(name, "keep", f"without vllm_mode is 'colocate' in TRL: {TRL['vllm_mode'].text}", {})
    is_cispo = config == "GRPOConfig" and values.get("loss_type") == "cispo" and values.get("epsilon") != 1.0
    if is_cispo and name == "epsilon":
        return Step(name, "replace", "is 1.0 for TRL's cispo, which has no lower bound", {"epsilon": 1.0})
    if is_cispo and name == "epsilon_high":
        return _bound_of_cispo(value, has_lower="epsilon" in values)
    if is_cispo and name == "loss_type" and "epsilon_high" not in values:
        return Step(name, "keep", "'cispo': set epsilon=1.0, and epsilon_high to the bound of TRL minus 1", {})
    return None


def _bound_of_cispo(bound: Any, *, has_lower: bool) -> Step:
    """TRL's bound of the ratio is epsilon_high itself, prefrl's is 1 + epsilon_high; nothing is cut off below."""
    if not isinstance(bound, int | float):
        return Step("epsilon_high", "keep", "is relative to 1 here: subtract 1, and set epsilon=1.0", {})
    lower = {} if has_lower else {"epsilon": 1.0}
    says = "is relative to 1 here, and TRL's cispo has no lower bound"
    return Step("epsilon_high", "replace", says, {**lower, "epsilon_high": bound - 1.0})


def _unknown(
    config: str | None, name: str, value: Any, values: Mapping[str, Any], known: Collection[str]
) -> Step | None:
    """An option that prefrl does not have."""
    row = NAMES.get(name)
    if row is None:
        return None if config is None else Step(name, "keep", f"is no option of {config}", {})
    if row.kind == "aside":
        return Step(name, "comment", row.says, {})
    is_unused = name == "vllm_mode" and not values.get("use_vllm")
    if row.may_go and (is_unused or row.convert is None):
        return Step(name, "replace", row.says, {})
    if row.kind == "renamed" and row.options[0] in known and (value is UNKNOWN or row.convert is None):
        return Step(name, "rename", row.says, {row.options[0]: value})
    options = row.says if value is UNKNOWN else converted(row, value)
    if isinstance(options, str):
        return Step(name, "keep", f"{row.says}{options.removeprefix(row.text).removeprefix(row.says)}", {})
    if not options.keys() <= {*known}:
        return Step(name, "keep", row.says, {})
    is_same = row.kind == "renamed" and [*options.values()] == [value]
    return Step(name, "rename" if is_same else "replace", row.says, options)


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
    config = config_of(algorithm)
    result, lines = Migrated(text), text.splitlines(keepends=True)
    for step in steps_of(config, {*options_of(algorithm), "env"}, values):
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


def _apply(step: Step, lines: list[str], first: int, end: int) -> None:
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
    commands = [command for command in REGISTRY if config_of(command) in DEFAULTS]
    fitting = [command for command in commands if known <= options_of(command)]
    if len(fitting) == 1:
        return fitting[0]
    which = f"they may be those of {', '.join(fitting)}" if fitting else "no algorithm has all of them"
    example = (fitting or commands)[0]
    raise ConfigError(
        f"the file's options do not tell its algorithm: {which}. Name it, for example --algorithm {example}"
    )
