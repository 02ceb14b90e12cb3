"""Parse the command line and YAML files into dataclasses, with errors that name the place and the nearest option."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from prefrl.errors import ConfigError
from prefrl.options.foreign import advice
from prefrl.options.suggest import nearest
from prefrl.scripts.yaml_file import NULL_TAG, read_yaml
from prefrl.trainer.base.flat_names import flat_parameters
from prefrl.trainer.base.size_options import AUTO, AUTOMATIC

__all__ = ["ArgumentParser", "CommandParser", "TrlParser"]

# Options of TrainingArguments that `--help` shows besides prefrl's own; `--help_all` shows every one.
_COMMON = frozenset(
    {
        "output_dir",
        "learning_rate",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "eval_strategy",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "report_to",
        "seed",
        "bf16",
        "resume_from_checkpoint",
        "push_to_hub",
    }
)
_SEE_ALL = "See --help_all for all options."
_SEE_ALL_EPILOG = "--help_all also lists the other options of transformers.TrainingArguments."


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with `--config FILE.yaml`: the file gives defaults, which the command line overrides.

    A scalar in the file is read like the same text on the command line, so that `1e-6` is a number and `no` a word.
    The mapping `env` of the file sets environment variables. A mistake on the command line is a ConfigError, too.

    Args:
        dataclass_types: Their fields are the options; one class or several.
        takes_config: False: there is no option `--config`; giving it is an error like any other unknown option.
        kwargs: For `argparse.ArgumentParser`.

    Raises:
        ConfigError: A class has a field `config`.
    """

    def __init__(
        self, dataclass_types: type | Iterable[type] | None = None, *, takes_config: bool = True, **kwargs: Any
    ) -> None:
        classes = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        about = {
            "usage": f"%(prog)s {'[--config FILE.yaml] ' if takes_config else ''}[--option value ...]",
            "epilog": _SEE_ALL_EPILOG if _has_training_options(classes) else None,
            "formatter_class": _HelpFormatter,
            "allow_abbrev": False,
        }
        super().__init__(**{**about, **kwargs, "add_help": False})
        self._takes_config = takes_config
        if takes_config:
            for cls in classes:
                if "config" in {field.name for field in _fields(cls)}:
                    raise ConfigError(f"{cls.__name__}.config: this option names the YAML file. Rename the field.")
            self.add_argument("--config", metavar="FILE.yaml", help="Options by name; those of the command line win.")
        self.add_argument("-h", "--help", action="store_true", help="Show prefrl's own options and the common others.")
        self.add_argument("--help_all", "--help-all", action="store_true", help="Show every option.")
        self._own = {action.dest for action in self._actions}
        self._flat: dict[type, dict[str, Any]] = {}  # keywords of each class that are no fields, with their defaults
        self._hints: dict[str, Any] = {}
        for cls in classes:
            self.dataclass_types.append(cls)
            self._add_dataclass_arguments(cls)
            self._hints |= typing.get_type_hints(cls)
            self._add_flat_names(cls)
        for action in self._actions:
            if action.dest in AUTOMATIC:
                action.type = _or_auto(action.type)

    def _add_flat_names(self, cls: type) -> None:
        """Take the keywords of a config that are no fields, without showing them in the help."""
        self._flat[cls] = {name: parameter.default for name, parameter in flat_parameters(cls).items()}
        hints = {name: self._hints[name].type for name in self._flat[cls]}
        self._hints |= hints
        fields = [
            (name, hint, dataclasses.field(default=self._flat[cls][name], metadata={"help": argparse.SUPPRESS}))
            for name, hint in hints.items()
        ]
        self._add_dataclass_arguments(dataclasses.make_dataclass("FlatNames", fields))

    def error(self, message: str) -> typing.NoReturn:
        """Raise an error instead of printing argparse's usage."""
        raise ConfigError(message)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """One instance of each dataclass; and a namespace of the options that `add_argument` added, if there are any.

        Args:
            args: The command line without the program's name; None: the one of this process.
            return_remaining_strings: Unknown options are no error: their words are returned, behind all else.
            fail_with_unknown_args: False: unknown options in the file are ignored.
            separate_remaining_strings: Return the words of the file and those of the command line as two lists.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type, or one that the config refuses.
            SystemExit: Help was asked for.
        """
        argv = sys.argv[1:] if args is None else list(args)
        keeps_entries = return_remaining_strings or not fail_with_unknown_args
        values, entries, words = self._read(argv, keeps_entries=keeps_entries, keeps_words=return_remaining_strings)
        output: tuple[Any, ...] = tuple(cls(**self._arguments(cls, values)) for cls in self.dataclass_types)
        others = values.keys() - self._own - self._hints.keys()
        if others:
            output = (*output, argparse.Namespace(**{name: values[name] for name in values if name in others}))
        if not return_remaining_strings:
            return output
        return (*output, entries, words) if separate_remaining_strings else (*output, entries + words)

    def parse_args_into_dataclasses(
        self, args: Iterable[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """The same as `parse_args_and_config`."""
        return self.parse_args_and_config(args, return_remaining_strings)

    def _read(
        self, argv: Sequence[str], *, keeps_entries: bool, keeps_words: bool
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Options by name; unknown options of the file and of the command line, as words of a command line."""
        early = _EarlyParser(argv)
        if early.wants_help:
            commands = {name: parser for action in self._subparsers_actions for name, parser in action.choices.items()}
            asked = next((commands[word] for word in argv if word in commands), self)
            asked.print_help(everything=early.wants_all)
            raise SystemExit(0)
        has_file = early.config is not None and self._takes_config
        entries = self._read_defaults(Path(str(early.config)), keeps_unknown=keeps_entries) if has_file else []
        values, words = self._values(argv, keeps_unknown=keeps_words)
        return values, entries, words

    def _arguments(self, cls: type, values: dict[str, Any]) -> dict[str, Any]:
        names = [field.name for field in _fields(cls)]
        return {name: values[name] for name in [*names, *self._flat[cls]]}

    def print_help(self, file: Any = None, *, everything: bool = False) -> None:
        """Print prefrl's own options and the common others, or everything."""
        hidden = {field.name for field in dataclasses.fields(TrainingArguments)} - _COMMON
        if not everything and _has_training_options(self.dataclass_types):
            for action in self._actions:
                if action.dest in hidden:
                    action.help = argparse.SUPPRESS
        super().print_help(file)

    @property
    def _by_name(self) -> dict[str, argparse.Action]:
        """The options; of two for one field, the first is the option itself, the second its --no_ form."""
        return {action.dest: action for action in reversed(self._actions) if action.dest not in self._own}

    @property
    def _subparsers_actions(self) -> list[Any]:
        return [action for action in self._actions if isinstance(action.choices, dict)]

    def _with_subparsers(self) -> list[ArgumentParser]:
        below = [parser for action in self._subparsers_actions for parser in action.choices.values()]
        return [self, *(parser for child in below for parser in child._with_subparsers())]

    def _values(self, argv: Sequence[str], *, keeps_unknown: bool) -> tuple[dict[str, Any], list[str]]:
        required = [action for action in self._by_name.values() if action.required]
        for action in required:  # report an unknown option first: it may be the missing one, misspelled
            action.required = False
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown and not keeps_unknown:
            self._refuse(unknown)
        values: dict[str, Any] = vars(namespace)
        missing = [action.dest for action in required if values[action.dest] is None]
        if missing:
            example = f"--{missing[0]} VALUE"
            raise ConfigError(f"{', '.join(missing)}: not given. Write {example}, or set it in the file of --config.")
        return values, unknown

    def _refuse(self, unknown: Sequence[str]) -> typing.NoReturn:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}: options are written as --name value")
        options = {option for action in self._actions for option in action.option_strings}
        remedy = advice(word, self._by_name) or nearest(word, options, otherwise=_SEE_ALL)
        raise ConfigError(f"unknown option {word!r}. {remedy}")

    def _read_defaults(self, path: Path, *, keeps_unknown: bool) -> list[str]:
        unknown: list[str] = []
        parsers = self._with_subparsers()
        known = {name for parser in parsers for name in parser._by_name}
        for name, line, node, loader in _entries(path):
            where = f"{path}:{line}"
            if name == "env" and name not in known:
                os.environ.update(_variables(where, node))
                continue
            if name not in known and keeps_unknown:
                unknown += [f"--{name}", str(loader.construct_object(node, deep=True))]
                continue
            if name not in known:
                remedy = advice(name, known) or nearest(name, known, otherwise=_SEE_ALL)
                raise ConfigError(f"{where}: unknown option {name!r}. {remedy}")
            try:
                for parser in parsers:
                    if name in parser._by_name:
                        action = parser._by_name[name]
                        action.default, action.required = parser._value(action, node, loader), False
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise ConfigError(f"{where}: {name}={_text(node)}: {error}") from error
        return unknown

    def _value(self, action: argparse.Action, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
        hint = self._hints.get(action.dest)  # None: an option of `add_argument`
        is_list = typing.get_origin(hint) is list
        alternatives = (hint,) if is_list else typing.get_args(hint) or (hint,)
        if node.tag == NULL_TAG:
            if type(None) not in alternatives:
                raise ValueError("null is not allowed, the option always has a value")
            return None
        if any(_has_form(part, node) for part in alternatives):
            return loader.construct_object(node, deep=True)
        if isinstance(node, yaml.MappingNode):
            raise ValueError("a mapping is not allowed here")
        if isinstance(node, yaml.SequenceNode):
            if action.nargs != "+":
                raise ValueError("a list is not allowed here")
            return [_scalar(action, item) for item in node.value]
        value = _scalar(action, node)
        return [value] if action.nargs == "+" else value


TrlParser = ArgumentParser  # its name in TRL


class CommandParser(ArgumentParser):
    """The parser of `prefrl <command>`.

    Args:
        command: What follows `prefrl` on the command line.
        dataclass_types: Their fields are the options.
        description: What the command does, for its help.
        takes_config: See `ArgumentParser`.
    """

    def __init__(
        self, command: str, dataclass_types: Sequence[type], description: str, *, takes_config: bool = True
    ) -> None:
        super().__init__(dataclass_types, takes_config=takes_config, prog=f"prefrl {command}", description=description)

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """One instance of each dataclass.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type, or one that the config refuses.
            SystemExit: Help was asked for.
        """
        return self.parse_args_and_config(argv)

    def parse_known(self, argv: Sequence[str]) -> tuple[tuple[Any, ...], list[str]]:
        """One instance of each dataclass, and the words of the command line that belong to no option.

        Raises:
            ConfigError: As `parse`, except for unknown options on the command line; unknown options in the file raise.
            SystemExit: Help was asked for.
        """
        values, _, words = self._read(argv, keeps_entries=False, keeps_words=True)
        return tuple(cls(**self._arguments(cls, values)) for cls in self.dataclass_types), words

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Every option by name, with the right type but not yet checked against the others.

        Raises:
            ConfigError: An unknown or missing option, or a value of the wrong type.
            SystemExit: Help was asked for.
        """
        return self._read(argv, keeps_entries=False, keeps_words=False)[0]


class _HelpFormatter(argparse.HelpFormatter):
    """Shows one spelling of each option, and the kind of value that it takes."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        option = action.option_strings[0] if action.option_strings else action.dest
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return f"{option} {action.metavar or self._kind(action)}"

    def _expand_help(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("%%", "%")
        is_unset = action.default is None or action.default is False or action.default == []
        return text if is_unset else f"{text} (default: {action.default})"

    def _kind(self, action: argparse.Action) -> str:
        if action.choices is not None:
            return "{" + ",".join(map(str, action.choices)) + "}"
        kind = {"string_to_bool": "true|false", "str": "text"}.get(name := _name(action.type or str), name)
        return f"{kind} ..." if action.nargs == "+" else kind


class _EarlyParser:
    """Finds the options that must be known before the others are parsed."""

    def __init__(self, argv: Sequence[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--config")
        parser.add_argument("-h", "--help", action="store_true")
        parser.add_argument("--help_all", "--help-all", action="store_true")
        try:
            known, _ = parser.parse_known_args(list(argv))
        except argparse.ArgumentError as error:
            raise ConfigError(str(error)) from error
        self.config: str | None = known.config
        self.wants_all: bool = known.help_all
        self.wants_help: bool = known.help or known.help_all


def _has_training_options(dataclass_types: Iterable[type]) -> bool:
    return any(issubclass(cls, TrainingArguments) for cls in dataclass_types)


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _entries(path: Path) -> list[tuple[str, int, yaml.Node, yaml.SafeLoader]]:
    """The name, line number and value of each option in a YAML file, with the loader."""
    root, loader = read_yaml(path, f"config={str(path)!r}")
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: must be a mapping of options to values")
    loader.flatten_mapping(root)
    entries = [(str(key.value), key.start_mark.line + 1, value, loader) for key, value in root.value]
    lines: dict[str, int] = {}
    for name, line, _, _ in entries:
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} was set in line {lines[name]} already. Remove one of them.")
        lines[name] = line
    return entries


def _has_form(hint: Any, node: yaml.Node) -> bool:
    """Whether the node is a mapping or a list of mappings, as the type requires."""
    if isinstance(node, yaml.SequenceNode) and typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return typing.get_origin(item) is dict or dataclasses.is_dataclass(item)
    return isinstance(node, yaml.MappingNode) and typing.get_origin(hint) is dict


def _scalar(action: argparse.Action, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("a list of lists or mappings is not allowed here")
    convert: Any = action.type or str
    try:
        value = convert(node.value)
    except ValueError as error:
        raise ValueError(f"must be of type {_name(convert)}") from error
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"must be one of {', '.join(map(str, action.choices))}")
    return value


def _or_auto(convert: Any) -> Callable[[str], Any]:
    """The type of an option that may also be "auto"."""

    def read(text: str) -> Any:
        return AUTO if text == AUTO else convert(text)

    read.__name__ = _name(convert)
    return read


def _variables(where: str, node: yaml.Node) -> dict[str, str]:
    """The values of a mapping as they are written."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else None
    if pairs is None or not all(isinstance(part, yaml.ScalarNode) for pair in pairs for part in pair):
        raise ConfigError(f"{where}: env: must be a mapping of environment variables to values")
    return {str(name.value): str(value.value) for name, value in pairs}


def _name(convert: Any) -> str:
    return str(getattr(convert, "__name__", convert))


def _text(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else type(node).__name__.removesuffix("Node").lower()
