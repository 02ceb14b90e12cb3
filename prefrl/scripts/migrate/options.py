"""What the options of a run of TRL are here, whatever file they stand in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefrl.options.foreign.transformers import TRANSFORMERS
from prefrl.options.foreign.trl import DEFAULTS, SAME_VALUES, TRL, VALUES
from prefrl.registry import REGISTRY
from prefrl.scripts.migrate.edits import converted
from prefrl.scripts.schema.parser import options_of

__all__ = ["NAMES", "UNKNOWN", "Step", "config_of", "missing_defaults", "say_written", "steps_of"]

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
    every = [option for algorithm in REGISTRY for option in options_of(algorithm)]
    off = {
        option["name"]
        for option in every
        if any(values.get(switch) is not True for switch in option.get("needs", ()) if switch != "episodes")
    }
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
