"""Parse the command line and YAML files into dataclasses, with errors that name the place and the nearest option."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from prefrl.errors import ConfigError
from prefrl.options.fields import about
from prefrl.options.training import AUTOMATIC
from prefrl.scripts.parsing.option_parser import EarlyParser, OptionParser, choice_of, form_of, or_auto

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
_SEE_ALL_EPILOG = "--help_all also lists the other options of transformers.TrainingArguments."


class ArgumentParser(OptionParser, HfArgumentParser):
    """`HfArgumentParser` with `--config FILE.yaml`: the file gives defaults, which the command line overrides.

    A scalar in the file is read like the same text on the command line, so that `1e-6` is a number and `no` a word.
    The mapping `env` of the file sets environment variables. A mistake on the command line is a ConfigError, too.

    Args:
        dataclass_types: One or several dataclasses, whose fields are the options.
        takes_config: Whether there is an option `--config`. If not, giving it is an error like any other unknown
            option.
        kwargs: For `argparse.ArgumentParser`.

    Raises:
        ConfigError: A class has a field `config`.
    """

    def __init__(
        self, dataclass_types: type | Iterable[type] | None = None, *, takes_config: bool = True, **kwargs: Any
    ) -> None:
        classes = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        epilog = _SEE_ALL_EPILOG if _has_training_options(classes) else None
        super().__init__(takes_config=takes_config, **{"epilog": epilog, **kwargs})
        for cls in classes:
            if takes_config and "config" in {field.name for field in _fields(cls)}:
                raise ConfigError(f"{cls.__name__}.config: this option names the YAML file. Rename the field.")
        self._hints: dict[str, Any] = {}
        for cls in classes:
            self.dataclass_types.append(cls)
            self._add_dataclass_arguments(cls)
            self._hints |= typing.get_type_hints(cls)
            self._needs |= {field.name: about(field).needs for field in _fields(cls)}
        self._forms = {name: form_of(hint) for name, hint in self._hints.items()}
        unlisted = {field.name for cls in classes for field in _fields(cls) if not about(field).is_listed}
        for action in self._actions:
            if action.dest in unlisted:
                action.help = argparse.SUPPRESS
            if any(isinstance(choice, bool) for choice in action.choices or ()):
                action.type = choice_of(action.choices or ())
            if action.dest in AUTOMATIC:
                action.type = or_auto(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return an instance of each dataclass, and a namespace of the options that `add_argument` added, if any.

        Args:
            args: The command line without the program's name. The default is that of this process.
            return_remaining_strings: Whether to return the words of unknown options at the end instead of raising an
                error.
            fail_with_unknown_args: Whether unknown options in the file are an error. If not, they are ignored.
            separate_remaining_strings: Return the words of the file and those of the command line as two lists.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type, or one that the config refuses.
            SystemExit: Help was asked for.
        """
        argv = sys.argv[1:] if args is None else list(args)
        keeps_entries = return_remaining_strings or not fail_with_unknown_args
        values, entries, words = self.read(argv, keeps_entries=keeps_entries, keeps_words=return_remaining_strings)
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

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Set defaults of options, those of commands included; an option with a default need not be given.

        Returns:
            The words of values that no option has, as on a command line.
        """
        known: set[str] = set()
        for parser in self._with_subparsers():
            for name, action in parser._by_name.items():
                if name in values:
                    action.default, action.required = values[name], False
                    known.add(name)
        return [word for name in values if name not in known for word in (f"--{name}", str(values[name]))]

    def _arguments(self, cls: type, values: dict[str, Any]) -> dict[str, Any]:
        return {field.name: values[field.name] for field in _fields(cls)}

    def show_help(self, argv: Sequence[str], early: EarlyParser) -> None:
        """Print the help of this parser, or of the command that `argv` names."""
        named = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        commands = {name: parser for choices in named for name, parser in choices.items()}
        asked = next((commands[word] for word in argv if word in commands), self)
        asked.print_help(everything=early.wants_all)

    def print_help(self, file: Any = None, *, everything: bool = False) -> None:
        """Print prefrl's own options and the common others, or everything."""
        hidden = {field.name for field in dataclasses.fields(TrainingArguments)} - _COMMON
        if not everything and _has_training_options(self.dataclass_types):
            for action in self._actions:
                if action.dest in hidden:
                    action.help = argparse.SUPPRESS
        super().print_help(file)


TrlParser = ArgumentParser  # its name in TRL


def _has_training_options(dataclass_types: Iterable[type]) -> bool:
    return any(issubclass(cls, TrainingArguments) for cls in dataclass_types)


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]
