"""A parser for commands that need no config, and so not the seconds that importing transformers takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from prefrl.errors import ConfigError
from prefrl.options.suggest import nearest

__all__ = ["LightParser"]


class LightParser(argparse.ArgumentParser):
    """argparse, with errors of one line and suggestions for unknown options."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options.

        Raises:
            ConfigError: An option is unknown or missing, or has a value of the wrong type.
            SystemExit: Help was asked for.
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            remedy = nearest(word, known) if word.startswith("-") else f"See {self.prog} --help."
            raise ConfigError(f"unknown argument {word!r}. {remedy}")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing argparse's usage."""
        raise ConfigError(f"{message}. See {self.prog} --help.")
