"""Parse the command line and YAML files of options, with errors that name the place and the nearest option."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import yaml

from prefrl.errors import ConfigError
from prefrl.options.fields import about, default_of, plain_value
from prefrl.options.names import advice, nearest
from prefrl.options.training import AUTO, AUTOMATIC
from prefrl.scripts.arguments.command import RewardEntry
from prefrl.scripts.arguments.datasets import DatasetConfig
from prefrl.scripts.parsing.yaml_file import NULL_TAG, entries_of, places_of

# Words that mean yes or no.
BOOLEANS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
_NULLS = ("null", "None")
_KINDS: dict[Any, str] = {int: "int", float: "float", bool: "bool", DatasetConfig: "dataset", RewardEntry: "reward"}
_ENDINGS_OF_DATA = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".gz")
# What values of a type are called, by the name of the function that reads them.
_IN_WORDS = {"int": "a whole number", "float": "a number"}
_IN_WORDS |= dict.fromkeys(("boolean", "string_to_bool"), "true or false")
# Columns of the help: all of them, and those of an option's name.
WIDTH, HEAD = 118, 36


class Form(NamedTuple):
    """What the value of an option may be besides a scalar or a list of scalars."""

    is_nullable: bool = False
    is_mapping: bool = False
    is_mappings: bool = False  # a list of mappings


class OptionParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with `--config FILE.yaml`: the file gives defaults, which the command line overrides.

    A scalar in the file is read like the same text on the command line, so that `1e-6` is a number and `no` a word.
    The words `null` and `None` are None for an option that may be None. A feature that the command line switches off
    takes its other options in the file with it. The first word may be the file, without `--config`.

    Args:
        takes_config: Whether there is an option `--config`. If not, giving it is an error like any other unknown
            option.
        groups: Titles of groups of options, in the order of the help.
        kwargs: For `argparse.ArgumentParser`.
    """

    see: ClassVar[str] = "See --help_all for all options."

    def __init__(self, *, takes_config: bool = True, groups: Iterable[str] = (), **kwargs: Any) -> None:
        about = {
            "usage": f"%(prog)s {'[FILE.yaml] ' if takes_config else ''}[--option value ...]",
            "formatter_class": partial(_HelpFormatter, max_help_position=HEAD, width=WIDTH),
            "allow_abbrev": False,
        }
        super().__init__(**{**about, **kwargs, "add_help": False})
        self.groups = {title: self.add_argument_group(title) for title in (*groups, "General")}
        general = self.groups["General"]
        self._takes_config = takes_config
        if takes_config:
            text = "YAML file with options; options on the command line override it."
            general.add_argument("--config", metavar="FILE.yaml", help=text)
        text = "Show the common options; with a word, the options that contain it."
        general.add_argument("-h", "--help", nargs="?", const="", metavar="[WORD]", help=text)
        general.add_argument("--help_all", "--help-all", action="store_true", help="Show every option.")
        self._own = {action.dest for action in self._actions}
        self._forms: dict[str, Form] = {}
        self._needs: dict[str, tuple[str, ...]] = {}  # the switches without which an option has no effect
        self.places: dict[str, str] = {}  # the options of the file, and their entries: where each stands

    def add_option(self, option: Mapping[str, Any], *aliases: str, group: str | None = None) -> None:
        """Add an option as `option_of` describes it.

        Args:
            option: Its name, kind, default and so on. Values that are false may be left out.
            aliases: Other spellings of the option.
            group: The title of the group in which the help shows it.
        """
        name = option["name"]
        about: dict[str, Any] = {"nargs": "+"} if option.get("is_list") else {}
        if option.get("is_flag"):
            about = {"nargs": "?", "const": True}
        choices = option.get("choices")
        convert = _CONVERTERS.get(option["kind"], str) if choices is None else choice_of(choices)
        shown_in = self if group is None else self.groups[group]
        shown_in.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *aliases)),
            type=or_auto(convert) if option.get("is_auto") else convert,
            choices=choices,
            default=option.get("default"),
            required=option.get("is_required", False),
            help=option.get("help", "").replace("%", "%%"),
            **about,
        )
        if option.get("has_no_form"):
            spellings = dict.fromkeys((f"--no_{name}", f"--no-{name.replace('_', '-')}"))
            off = {"action": "store_false", "dest": name, "default": option.get("default")}
            shown_in.add_argument(*spellings, help=f"The same as --{name} false.", **off)
        self._forms[name] = Form(*(option.get(form, False) for form in Form._fields))
        self._needs[name] = tuple(option.get("needs", ()))

    def error(self, message: str) -> typing.NoReturn:
        """Raise an error instead of printing argparse's usage."""
        raise ConfigError(message)

    def read(
        self, argv: Sequence[str], *, keeps_entries: bool = False, keeps_words: bool = False
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Options by name; unknown options of the file and of the command line, as words of a command line.

        Args:
            argv: The command line without the program's name.
            keeps_entries: Whether unknown options of the file are allowed.
            keeps_words: Whether unknown options of the command line are allowed.

        Raises:
            ConfigError: An unknown or missing option, or a value of the wrong type.
            SystemExit: Help was asked for.
        """
        if self._takes_config and argv and argv[0].endswith((".yaml", ".yml")):
            argv = ["--config", *argv]
        early = EarlyParser(argv)
        if early.wants_help:
            self.show_help(argv, early)
            raise SystemExit(0)
        self.places = {}
        has_file = early.config is not None and self._takes_config
        off = self._switched_off(argv)
        entries = self._read_defaults(Path(str(early.config)), off, keeps_unknown=keeps_entries) if has_file else []
        # An unknown option is reported before a missing one: it may be the missing one, misspelled.
        required = [action.dest for action in self._by_name.values() if action.required]
        namespace, words = self._parse_leniently(argv)
        if words and not keeps_words:
            self._refuse(words)
        values: dict[str, Any] = {name: None if value == [None] else value for name, value in vars(namespace).items()}
        if missing := [name for name in required if values[name] is None]:
            example = f"--{missing[0]} VALUE"
            raise ConfigError(f"{', '.join(missing)}: not given. Write {example}, or set it in the file of --config.")
        return values, entries, words

    def show_help(self, argv: Sequence[str], early: EarlyParser) -> None:
        """Print the help that the command line asks for."""
        self.print_help()

    def given(self, argv: Sequence[str]) -> set[str]:
        """The names of the options that the command line sets."""
        by_option = {option: action.dest for action in self._actions for option in action.option_strings}
        return {by_option[word] for word in (text.split("=")[0] for text in argv) if word in by_option}

    def _switched_off(self, argv: Sequence[str]) -> dict[str, str]:
        """The options that belong to features that the command line switches off, and the name of the feature."""
        switches = self.given(argv) & {switch for needs in self._needs.values() for switch in needs}
        if not switches:
            return {}
        namespace, _ = self._parse_leniently(argv)
        off = [name for name in switches if getattr(namespace, name) in (False, None)]
        return {
            option: name
            for option, needs in self._needs.items()
            for name in needs
            if name in off and option not in self.given(argv)
        }

    def _parse_leniently(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse without asking for options that must be given."""
        required = [action for action in self._by_name.values() if action.required]
        for action in required:
            action.required = False
        try:
            return self.parse_known_args(list(argv))
        finally:
            for action in required:
                action.required = True

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if arg_string in _NULLS and self._forms.get(action.dest, Form()).is_nullable:
            return None
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            is_told = isinstance(error.__context__, argparse.ArgumentTypeError)
            if is_told and _name(action.type) not in _IN_WORDS:
                raise ConfigError(f"{action.dest}={arg_string!r}: {error.message}") from None
            raise ConfigError(f"{action.dest}={arg_string!r}: must be {_kind_in_words(action.type)}.") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not None and action.choices is not None and value not in action.choices:
            if isinstance(action.choices, dict):  # commands
                super()._check_value(action, value)
            raise ConfigError(f"{action.dest}={value!r}: {_not_a_choice(value, action.choices)}")

    @property
    def _by_name(self) -> dict[str, argparse.Action]:
        """The options; of two for one field, the first is the option itself, the second its --no_ form."""
        return {action.dest: action for action in reversed(self._actions) if action.dest not in self._own}

    def _with_subparsers(self) -> list[OptionParser]:
        below = [
            child for action in self._actions if isinstance(action.choices, dict) for child in action.choices.values()
        ]
        return [self, *(parser for child in below for parser in child._with_subparsers())]

    def _refuse(self, unknown: Sequence[str]) -> typing.NoReturn:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            if word.lower().endswith(_ENDINGS_OF_DATA) and "dataset_name" in self._by_name:
                raise ConfigError(f"unexpected argument {word!r}. Write --dataset_name {word}.")
            raise ConfigError(
                f"unexpected argument {word!r}: options are written as --name value, and a YAML file comes first"
            )
        options = {option for action in self._actions for option in action.option_strings}
        raise ConfigError(f"unknown option {word!r}. {self.remedy(word, options)}")

    def remedy(self, name: str, known: Collection[str]) -> str:
        """What to do about an unknown option, among options that are written like it."""
        return advice(name, self._by_name) or nearest(name, known, otherwise=self.see)

    def _read_defaults(self, path: Path, off: Mapping[str, str], *, keeps_unknown: bool) -> list[str]:
        unknown: list[str] = []
        parsers = self._with_subparsers()
        known = {name for parser in parsers for name in parser._by_name}
        for name, line, node, loader in entries_of(path):
            where = f"{path}:{line}"
            if name == "env" and name not in known:
                os.environ.update(_variables(where, node))
                continue
            if name not in known and keeps_unknown:
                unknown += [f"--{name}", str(loader.construct_object(node, deep=True))]
                continue
            if name not in known:
                raise ConfigError(f"{where}: unknown option {name!r}. {self._remedy_in_file(name, node, known)}")
            if name in off:
                note = f"note: {where}: {name} is left out, because the command line switches {off[name]} off"
                print(note, file=sys.stderr)
                continue
            self.places |= places_of(name, node, path, line)
            try:
                for parser in parsers:
                    if name in parser._by_name:
                        action = parser._by_name[name]
                        action.default, action.required = parser._value(action, node, loader), False
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise ConfigError(f"{where}: {name}={_text(node)}: {error}") from error
        return unknown

    def _remedy_in_file(self, name: str, node: yaml.Node, known: Collection[str]) -> str:
        """See `remedy`; of a section of options, which another library's file may have, that there are none here."""
        inner = [str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        inside = [key for key in inner if key in known]
        if not inside:
            return self.remedy(name, known)
        return f"Options are not in sections: write {inside[0]} and the others below {name!r} at the left margin."

    def _value(self, action: argparse.Action, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
        form = self._forms.get(action.dest, Form())
        if node.tag == NULL_TAG or (form.is_nullable and node.value in _NULLS):
            if not form.is_nullable:
                raise ValueError("null is not allowed, the option always has a value")
            return None
        is_list = isinstance(node, yaml.SequenceNode)
        if (form.is_mappings and is_list) or (form.is_mapping and isinstance(node, yaml.MappingNode)):
            return loader.construct_object(node, deep=True)
        if isinstance(node, yaml.MappingNode):
            raise ValueError("a mapping is not allowed here")
        if isinstance(node, yaml.SequenceNode):
            if action.nargs != "+":
                raise ValueError("a list is not allowed here")
            return [_scalar(action, item) for item in node.value]
        value = _scalar(action, node)
        return [value] if action.nargs == "+" else value


def form_of(hint: Any) -> Form:
    """What a value of the type may be besides a scalar or a list of scalars."""
    is_list = typing.get_origin(hint) is list
    parts = (hint,) if is_list else typing.get_args(hint) or (hint,)
    items = [item for part in parts if typing.get_origin(part) is list for item in typing.get_args(part)]
    return Form(
        is_nullable=type(None) in parts,
        is_mapping=RewardEntry in items or any(typing.get_origin(part) is dict for part in parts),
        is_mappings=any(
            typing.get_origin(item) is dict or dataclasses.is_dataclass(item) or item is RewardEntry for item in items
        ),
    )


def option_of(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """A field of a dataclass as `OptionParser.add_option` takes it; what is false or empty is left out."""
    default = plain_value(default_of(field))
    kind, is_list, choices = _kind_of(hint)
    form = form_of(hint)
    row = {
        "name": field.name,
        "kind": kind,
        "help": str(field.metadata.get("help", "")).replace("%%", "%"),
        "choices": choices,
        "is_list": is_list,
        "is_flag": kind == "bool" and not is_list and not (form.is_nullable and default is None),
        "is_required": default is dataclasses.MISSING,
        "is_auto": field.name in AUTOMATIC,
        "needs": list(about(field).needs),
        "has_no_form": default is True,
        "hint": hint,
        **form._asdict(),
    }
    kept = {key: value for key, value in row.items() if value not in (None, False, "", {}, [])}
    return {**kept, "default": default} if isinstance(default, bool | int | float | str | list) else kept


def _kind_of(hint: Any) -> tuple[str, bool, list[Any] | None]:
    """The kind of a value or of the entries of a list, whether there is a list, and the choices.

    Of a union, it is the first type besides None that is no mapping.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return _kind_of(parts[0])[0], True, None
    if origin is Literal:
        return "str", False, list(parts)
    if not parts:
        return _KINDS.get(hint, "str"), False, None
    if origin is Annotated:
        return _kind_of(parts[0])
    types = [part for part in parts if part is not type(None) and typing.get_origin(part) is not dict]
    return _kind_of(types[0] if types else str)


def or_auto(convert: Any) -> Callable[[str], Any]:
    """The type of an option that may also be "auto"."""

    def read(text: str) -> Any:
        return AUTO if text == AUTO else convert(text)

    read.__name__ = f"{_name(convert)}|{AUTO}"
    return read


def choices_in_words(choices: Iterable[Any] | None) -> str:
    """What the help says of a closed set of values; nothing if there is none."""
    return f" One of {', '.join(map(str, choices))}." if choices is not None else ""


def default_in_words(default: Any) -> str:
    """What the help says of the default of an option; nothing if it is off."""
    return "" if default is None or default is False or default in ([], "") else f" (default: {default})"


class _HelpFormatter(argparse.HelpFormatter):
    """Shows one spelling of each option, the kind of value that it takes, and the values of a closed set."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill each paragraph, but the examples, which are commands."""
        parts = text.split("\n\n")
        return "\n\n".join(p if p.startswith("Example") else textwrap.fill(p, width) for p in parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings or [action.dest]
        option = next((name for name in names if name.startswith("--")), names[0])
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return option if action.choices is not None else f"{option} {action.metavar or self._kind(action)}"

    def _expand_help(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("%%", "%")
        return text + choices_in_words(action.choices) + default_in_words(action.default)

    def _kind(self, action: argparse.Action) -> str:
        kinds = {"string_to_bool": "true|false", "boolean": "true|false", "str": "text", "RewardEntry": "text"}
        kind = kinds.get(name := _name(action.type or str), name)
        return f"{kind} ..." if action.nargs == "+" else kind


class EarlyParser:
    """Finds the options that must be known before the others are parsed."""

    def __init__(self, argv: Sequence[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--config")
        parser.add_argument("-h", "--help", nargs="?", const="")
        parser.add_argument("--help_all", "--help-all", action="store_true")
        try:
            known, _ = parser.parse_known_args(list(argv))
        except argparse.ArgumentError as error:
            raise ConfigError(str(error)) from error
        self.config: str | None = known.config
        self.wants_all: bool = known.help_all
        self.word: str = known.help or ""
        self.wants_help: bool = known.help is not None or known.help_all


def boolean(text: str) -> bool:
    """A word that means yes or no.

    Raises:
        ValueError: It means neither.
    """
    if text.lower() not in BOOLEANS:
        raise ValueError(text)
    return BOOLEANS[text.lower()]


# What makes a value of a word, by the kind of the option; of others, it is the word itself.
_CONVERTERS: dict[str, Any] = {kind: convert for convert, kind in _KINDS.items()} | {"bool": boolean}


def choice_of(choices: Iterable[Any]) -> Callable[[str], Any]:
    """The type of an option with choices: from a word to its choice, which may be a number; `false` to False."""
    by_word = {str(choice): choice for choice in choices}
    by_word |= {word.lower(): choice for word, choice in by_word.items() if isinstance(choice, bool)}

    def read(text: str) -> Any:
        return by_word.get(text, text)

    read.__name__ = "str"
    return read


def _scalar(action: argparse.Action, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("a list of lists or mappings is not allowed here")
    convert: Any = action.type or str
    try:
        value = convert(node.value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        if isinstance(error, argparse.ArgumentTypeError) and _name(convert) not in _IN_WORDS:
            raise
        raise ValueError(f"must be {_kind_in_words(convert)}") from error
    if action.choices is not None and value not in action.choices:
        raise ValueError(_not_a_choice(value, action.choices))
    return value


def _kind_in_words(convert: Any) -> str:
    """What a value has to be, as in "must be a whole number"."""
    name, _, auto = _name(convert).partition("|")
    words = _IN_WORDS.get(name, f"of type {name}")
    return f"{words}, or {auto}" if auto else words


def _not_a_choice(value: Any, choices: Iterable[Any]) -> str:
    """What to say of a value that is not among the choices: the one that is meant, and all of them."""
    words = [str(choice) for choice in choices]
    guess = nearest(str(value), words, otherwise=" ").strip()
    return f"must be one of {', '.join(words)}." + (f" {guess}" if guess else "")


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
