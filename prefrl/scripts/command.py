"""How a command is declared: a function of its options becomes the `main(argv)` that `prefrl` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefrl.scripts.parsing.command_parser import CommandParser

__all__ = ["Command", "command"]


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
