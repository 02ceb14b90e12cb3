"""What commands share: how one is declared, and logs of errors alone."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prefrl.scripts.parsing.option_parser import OptionParser, option_of


class CommandParser(OptionParser):
    """`prefrl merge ADAPTER OUTPUT_DIR` is `prefrl merge --adapter ADAPTER --output_dir OUTPUT_DIR`.

    Args:
        command: What follows `prefrl` on the command line.
        dataclass_types: Their fields are the options.
        description: What the command does, for its help.
        takes_config: See `OptionParser`.
        positional: Options that may be given without their names, in the order of the words. They need a default. If
            the last one is a list, it takes all words that are left.
    """

    see: ClassVar[str] = "See --help."

    def __init__(
        self,
        command: str,
        dataclass_types: Sequence[type],
        description: str,
        *,
        takes_config: bool = True,
        positional: Sequence[str] = (),
    ) -> None:
        about = {"prog": f"prefrl {command}", "description": description}
        titles = [_titles(cls) for cls in dataclass_types]
        groups = dict.fromkeys(title for of_class in titles for title in reversed(of_class.values()))
        super().__init__(takes_config=takes_config, groups=groups, **about)
        self._dataclass_types, self._positional = tuple(dataclass_types), tuple(positional)
        for action in self._actions:
            if action.dest == "help":
                action.nargs, action.metavar, action.help = 0, None, "Show this help."
            if action.dest == "help_all":
                action.help = argparse.SUPPRESS
        for cls, groups_of in zip(dataclass_types, titles, strict=True):
            hints = typing.get_type_hints(cls, include_extras=True)
            for field in _fields(cls):
                row = option_of(field, hints[field.name])
                self.add_option(row, *field.metadata.get("aliases", ()), group=groups_of[field.name])
        if positional:
            words = " ".join(f"[{name.upper()}{' ...' * self._is_list(name)}]" for name in positional)
            config = "[--config FILE.yaml] " if takes_config else ""
            self.usage = f"%(prog)s {words} {config}[--option value ...]"
        elif not any(map(_fields, dataclass_types)):
            self.usage = "%(prog)s"

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """One instance of each dataclass. Words before the first option are positional.

        Raises:
            ConfigError: An unknown or missing option, a value of the wrong type, or one that the dataclass refuses.
            SystemExit: Help was asked for.
        """
        return self._made(self.read(self._named(argv))[0])

    def parse_known(self, argv: Sequence[str]) -> tuple[tuple[Any, ...], list[str]]:
        """One instance of each dataclass, and the words of the command line that belong to no option.

        Raises:
            ConfigError: As `parse`, except for unknown options on the command line; unknown options in the file raise.
            SystemExit: Help was asked for.
        """
        values, _, words = self.read(self._named(argv), keeps_words=True)
        return self._made(values), words

    def _named(self, argv: Sequence[str]) -> list[str]:
        words: list[str] = []
        rest = list(argv)
        takes_all = bool(self._positional) and self._is_list(self._positional[-1])
        while rest and not rest[0].startswith("-") and (takes_all or len(words) < len(self._positional)):
            words.append(rest.pop(0))
        # The last option takes what is left, which is one word unless its value is a list.
        given = [(name, [word]) for name, word in zip(self._positional[:-1], words, strict=False)]
        if left := words[len(given) :]:
            given.append((self._positional[-1], left))
        return [*(part for name, values in given for part in (f"--{name}", *values)), *rest]

    def _is_list(self, name: str) -> bool:
        return self._by_name[name].nargs == "+"

    def _made(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(
            cls(**{field.name: values[field.name] for field in _fields(cls)}) for cls in self._dataclass_types
        )


def _titles(cls: Any) -> dict[str, str]:
    """The group of each option: what the class in which it is declared calls GROUP."""
    declared = {owner: vars(owner).get("__annotations__", {}) for owner in reversed(cls.__mro__)}
    return {name: vars(owner).get("GROUP", "Options") for owner, names in declared.items() for name in names}


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


@dataclass(frozen=True)
class Command:
    """Parses a command line and runs.

    Args:
        run: Gets an instance of each dataclass of options, and returns the exit code.
        name: What follows `prefrl` on the command line.
        options: Dataclasses, whose fields are the options.
        about: What the command does, for its help.
        takes_config: Whether options may come from a YAML file.
        positional: Options that may be given without their names, in the order of the words.
    """

    run: Callable[..., int]
    name: str
    options: tuple[type, ...]
    about: str
    takes_config: bool
    positional: tuple[str, ...]

    def __call__(self, argv: Sequence[str]) -> int:
        """Run with the words after the command's name, and return the exit code.

        Raises:
            PrefrlError: An option is wrong, or the options ask for something that cannot work.
            SystemExit: Help was asked for.
        """
        return self.run(*self.parser().parse(argv))

    def parser(self) -> CommandParser:
        """The parser of the command line."""
        return CommandParser(
            self.name, self.options, self.about, takes_config=self.takes_config, positional=self.positional
        )


def command(
    name: str, *options: type, about: str, takes_config: bool = True, positional: tuple[str, ...] = ()
) -> Callable[[Callable[..., int]], Command]:
    """Declare the command that a function of instances of `options` runs; see `Command`."""
    return lambda run: Command(run, name, options, about, takes_config, positional)


def init_zero_verbose() -> None:
    """Log only errors, in color, and send Python's warnings to the log instead of the terminal.

    This also hides prefrl's own warnings. Call it before other libraries set up their logs.
    """
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    logging.captureWarnings(True)
