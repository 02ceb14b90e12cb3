"""Reads the values of another library's files by the paths of their keys, and says what options they become here."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, Literal

import yaml

from prefrl.errors import ConfigError
from prefrl.scripts.arguments.datasets import SHAPING
from prefrl.scripts.migrate.edits import Migrated, converted, every_option, option_names_of
from prefrl.scripts.migrate.rows import Counterpart, row_of

Values = dict[str, tuple[int, Any]]  # path of keys -> line number and value

# Mappings with these names are arguments of something else.
_WHOLE = ("_kwargs", "override_config")
# What stands for a value that is not in the file: ${...} of OmegaConf, or a variable of the shell.
UNKNOWN = re.compile(r"\$[{(\w]")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
# Of OmegaConf: the value of a key, or a default.
_SELECT = "oc.select:"
# References may name references; more of them refer to each other in a circle. No value gets longer than that.
_MAX_ROUNDS, _MAX_CHARACTERS = 10, 2**12


def library_of(text: str) -> Literal["verl", "ludwig"] | None:
    """Whose YAML this is; None: that of neither verl nor Ludwig.

    Raises:
        ConfigError: It is axolotl's.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    keys = {key.value: value for key, value in pairs}
    sections = {key for key, value in keys.items() if isinstance(value, yaml.MappingNode)}
    if "actor_rollout_ref" in sections or {"data", "trainer"} <= sections or {"data", "model"} <= sections:
        return "verl"
    if {"input_features", "output_features"} & keys.keys():
        return "ludwig"
    if "base_model" in keys:
        raise ConfigError(
            "this is a file of axolotl, which is not migrated: the table in docs/migrating_from_verl_and_cosmos_rl.md "
            "says what its keys are here"
        )
    return None


def of_yaml(text: str, known: Collection[str]) -> Values:
    """The values of a YAML file, with its references to keys of its own put in.

    Args:
        text: The file.
        known: The library's paths of keys. A mapping of arguments is one value, unless keys of it are known.

    Raises:
        ConfigError: A value cannot be read.
    """

    def leaves(node: yaml.Node, path: str, line: int) -> Iterator[tuple[str, tuple[int, Any]]]:
        is_whole = path.endswith(_WHOLE) and not any(name.startswith(f"{path}.") for name in known)
        if isinstance(node, yaml.MappingNode) and node.value and not is_whole:
            for key, value in node.value:
                yield from leaves(value, f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1)
        else:
            yield path, (line, _number(_loaded(yaml.serialize(node), path)))

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return _resolved(dict(leaves(root, "", 1))) if isinstance(root, yaml.MappingNode) else {}


def of_toml(text: str, *whole: str) -> Values:
    """The values of a TOML file; mappings with the names in `whole` are values, too.

    Raises:
        ConfigError: It is not TOML.
    """
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError("this file of TOML is nested too deeply: is it a file of options?") from error
    except ValueError as error:  # also of numbers that Python does not read
        raise ConfigError(f"this is not TOML: {error}") from error
    lines = _lines_of_toml(text, whole)
    return {path: (lines.get(path, 1), value) for path, value in _flat(tree, whole)}


def of_command(text: str, sections: Collection[str]) -> Values:
    """The words `path.of.keys=value` of a shell script, for some first keys, with the variables that it sets."""
    values: Values = {}
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(_expanded(line.rstrip().removesuffix("\\"), variables), comments=True)
        except ValueError:  # a quotation over several lines
            continue
        for word in words:
            name, _, value = word.partition("=")
            path = name.lstrip("+")
            if path.split(".")[0] in sections and "." in path:
                values[path] = (number, _number(_loaded(value, path)))
            elif name.isidentifier():
                variables[name] = value
    return values


def _loaded(text: str, path: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: this value cannot be read: {str(error).splitlines()[0]}") from error


def _resolved(values: Values) -> Values:
    """The values with those of the keys that they refer to, as far as the file has them."""
    for _ in range(_MAX_ROUNDS):
        found = {path: (line, _put_in(path, value, values)) for path, (line, value) in values.items()}
        if found == values:
            break
        values = found
    return values


def _put_in(path: str, value: Any, values: Values) -> Any:
    """A value with its references put in; those within a text or a list become text."""
    if isinstance(value, list):
        return [_filled(path, entry, values) if isinstance(entry, str) else entry for entry in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    return _filled(path, value, values) if alone is None else _referred(path, alone, values)


def _filled(path: str, text: str, values: Values) -> str:
    text = _REFERENCE.sub(lambda found: str(_referred(path, found, values)), text)
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{path}: has more than {_MAX_CHARACTERS} characters with its references put in")
    return text


def _referred(path: str, reference: re.Match[str], values: Values) -> Any:
    """The value of a key; the reference itself if the file has no such key."""
    name, _, default = reference[1].removeprefix(_SELECT).partition(",")
    num_dots = len(name) - len(name.lstrip("."))
    above = path.split(".")[:-num_dots] if num_dots else []
    name = ".".join([*above, name.strip(". ")])
    if name in values:
        return values[name][1]
    return _number(_loaded(default, path)) if reference[1].startswith(_SELECT) and default else reference[0]


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """A line with the variables that the script sets itself, and with products of numbers."""
    line = re.sub(
        r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
        lambda found: variables.get(found[1] or found[3], found[2] or found[0]),
        line,
    )
    return re.sub(r"\$\(\(([\d* ]+)\)\)", lambda found: str(prod(map(int, found[1].split("*")))), line)


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, hydra as a number."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _flat(tree: Mapping[str, Any], whole: Collection[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in whole:
            yield from _flat(value, whole, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _lines_of_toml(text: str, whole: Collection[str]) -> dict[str, int]:
    section, lines = "", {}
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[([\w.]+)\]", line):
            section = f"{found[1]}."
            if found[1].rpartition(".")[2] in whole:
                lines[found[1]] = number
        elif found := re.match(r"\s*([\w.]+)\s*=", line):
            lines[section + found[1]] = number
    return lines


_OF_EVALUATION = (
    *("eval_steps", "eval_on_start", "dataset_test_split", "test_split_size", "eval_datasets", "temperature_eval"),
    *("num_generations_eval", "eval_sampling_kwargs", "log_val_generations", "max_eval_samples"),
)
_OF_CHECKPOINTS = ("save_steps", "save_in_background", "save_total_limit", "upload_to", "upload_kwargs")
# What a value may be where the default has this type, and how messages call it.
_KINDS: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    list: (list, str),
}
_CALLED = {bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list or a text"}
_OF_ONE_DATASET = {  # and their names in an entry of `datasets`
    "dataset_name": "path",
    "dataset_config": "name",
    "dataset_train_split": "split",
    "dataset_revision": "revision",
    **{name: name for name in SHAPING},
}


class ForeignRun:
    """The options that the values of a run become.

    Args:
        values: The values.
        rows: What the library's names are here.
        options: Options to begin with: what the library does if a value is not given.
    """

    def __init__(self, values: Values, rows: Mapping[str, Counterpart], options: Mapping[str, Any]) -> None:
        self.values, self.rows, self.options = values, rows, dict(options)
        self._defaults = frozenset(options)
        self.changes: list[tuple[int, str]] = []
        self.open: list[tuple[int, str]] = []
        self._server: list[str] = []  # options of prefrl vllm-serve
        for path, (line, value) in values.items():
            self._convert(path, line, value)

    def value(self, path: str, default: Any) -> Any:
        """The value at a path of keys.

        Args:
            path: The keys.
            default: The value if none is given, or if it is not in the file; a value of another type is refused.

        Raises:
            ConfigError: It has another type.
        """
        value = self.values.get(path, (0, None))[1]
        if value is None:
            return default
        kinds = _KINDS.get(type(default), (object,))
        if isinstance(value, kinds) and (not isinstance(value, bool) or {bool, object} & {*kinds}):
            return value
        if UNKNOWN.search(str(value)):
            return default
        raise ConfigError(f"{path}={value!r}: must be {_CALLED[type(default)]}")

    def number(self, path: str, default: int, *, least: int | None = None) -> int:
        """The integer at a path of keys, see `value`; ConfigError if it is none, or too small."""
        value = int(self.value(path, default))
        if least is not None and value < least:
            raise ConfigError(f"{path}={value!r}: must be at least {least}")
        return value

    def texts(self, path: str) -> list[str]:
        """The texts at a path of keys: one, several or none.

        Raises:
            ConfigError: It holds something else.
        """
        value = self.value(path, [])
        texts = [value] if isinstance(value, str) else value
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{path}={value!r}: must be a text, or a list of texts")
        return texts

    def leave_open(self, path: str, text: str) -> None:
        """Say what is left to do about a path of keys."""
        line, value = self.values[path]
        self.open.append((line, f"{path}={value!r}: {text}"))

    def drop(self, *names: str, because: str) -> None:
        """Leave out options that would have no effect, and say so of those that were given."""
        for name in names:
            if name in self.options:
                value = self.options.pop(name)
                if name not in self._defaults:
                    self.changes.append((1, f"{name}={value!r}: left out, because {because}"))

    def into_datasets(self) -> None:
        """Write the dataset as the only entry of `datasets`."""
        entry = {key: self.options.pop(name, None) for name, key in _OF_ONE_DATASET.items()}
        self.options["datasets"] = [{key: value for key, value in entry.items() if value is not None}]

    def _convert(self, path: str, line: int, value: Any) -> None:
        leaf, row = path.rpartition(".")[2], row_of(self.rows, path)
        if leaf == "_target_":
            return
        if UNKNOWN.search(str(value)):
            self.open.append((line, f"{path}={value!r}: write out the value, which is not in this file"))
        if row is None and leaf in every_option():
            self._add({leaf: value})
        elif row is None:
            self.open.append((line, f"{path}={value!r}: no such option is known"))
        elif row.kind == "becomes" and row.convert is None:  # together with other keys: the caller's matter
            self.changes.append((line, f"{path}={value!r} {row.says}"))
        elif row.kind == "not needed" or _is_off(value):
            self._leave_out(path, line, value, row)
        elif row.kind == "server" and row.text.startswith("--"):
            self._server.append(f"{row.text} {value}")
            self.changes.append((line, f"{path}={value!r} {row.says}"))
        elif row.convert is None:
            self.open.append((line, f"{path}={value!r} {row.says}"))
        else:
            self._take(path, line, value, row)

    def _leave_out(self, path: str, line: int, value: Any, row: Counterpart) -> None:
        """A key that is not needed, or that switches something off: its row may know an option for that."""
        options = None if row.convert is None or value is None else converted(row, value)
        if isinstance(options, str) or not options:
            self.changes.append((line, f"{path}={value!r} {row.says}" if row.may_go else f"{path} is off"))
        else:
            self._take(path, line, value, row)

    def _take(self, path: str, line: int, value: Any, row: Counterpart) -> None:
        options = converted(row, value)
        if isinstance(options, str):
            self.open.append((line, f"{path}: {options}"))
            return
        self._add(options)
        shown = ", ".join(f"{name}={given!r}" for name, given in options.items()) or "nothing has to be set"
        self.changes.append((line, f"{path}={value!r}: {shown}"))

    def _add(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            there = self.options.get(name)
            both = isinstance(there, dict) and isinstance(value, dict)
            self.options[name] = {**there, **value} if both else value  # type: ignore[dict-item]  # both are mappings

    def written(self, command: str, processes: int, *, shards_weights: bool = False) -> Migrated:
        """The YAML file, with what it leaves open as comments.

        Args:
            command: The algorithm.
            processes: Their number; with 1, the file does not name it.
            shards_weights: Whether several processes share one copy of the weights.
        """
        self._leave_out_what_has_no_effect()
        known = option_names_of(command)
        for name in [name for name in self.options if name not in known]:
            value = self.options.pop(name)
            notes = self.changes if _is_off(value) or name in self._defaults else self.open
            notes.append((1, f"{name}={value!r}: left out, prefrl {command} has no such option"))
        if processes > 1:
            self.options |= {"num_processes": processes} | ({"accelerate_config": "fsdp2"} if shards_weights else {})
        head = [f"# prefrl {command} --config FILE"]
        if self.options.get("use_vllm"):
            model = self.options.get("model_name_or_path", "MODEL")
            head.append(f"# prefrl vllm-serve --model {model} {' '.join(self._server)}".rstrip())
        head += [f"# Open: line {line}: {text}" for line, text in sorted(self.open)]
        body = yaml.safe_dump(self.options, sort_keys=False, allow_unicode=True)
        return Migrated("\n".join(head) + "\n" + body, sorted(self.changes), sorted(self.open))

    def _leave_out_what_has_no_effect(self) -> None:
        """What belongs to evaluation, checkpoints or adapters that are off would be an error here."""
        if not self.options.get("use_peft"):
            names = [name for name in self.options if name.startswith("lora_")]
            self.drop(*names, because="no adapter is trained")
        if self.options.get("eval_strategy", "no") == "no":
            self.drop(*_OF_EVALUATION, because="nothing is evaluated")
        if self.options.get("save_strategy") == "no":
            self.drop(*_OF_CHECKPOINTS, because="there are no checkpoints")
        if not self.options.get("push_to_hub"):
            self.drop("hub_model_id", because="nothing is pushed to the Hub")
        if "datasets" in self.options:
            shaping = {name: self.options.pop(name) for name in SHAPING if name in self.options}
            self.options["datasets"] = [{**part, **shaping} for part in self.options["datasets"]]


def _is_off(value: Any) -> bool:
    """Whether a value of a switch or a size asks for nothing."""
    if isinstance(value, bool) or value is None:
        return not value
    return value in ("", "none", "None", "default", -1, 0, 1, [], {})
