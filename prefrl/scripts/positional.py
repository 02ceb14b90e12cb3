"""The parser of commands whose main options may also be given without their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefrl.scripts.parser import CommandParser

__all__ = ["PositionalParser"]


class PositionalParser(CommandParser):
    """`prefrl merge ADAPTER OUTPUT_DIR` is `prefrl merge --adapter ADAPTER --output_dir OUTPUT_DIR`.

    The help shows all options, even those with the name of an option of transformers.TrainingArguments.

    Args:
        command: What follows `prefrl` on the command line.
        dataclass_types: Their fields are the options; those that are positional need a default.
        description: What the command does, for its help.
        positional: Names of options, in the order of the words.
    """

    def __init__(
        self, command: str, dataclass_types: Sequence[type], description: str, *, positional: Sequence[str]
    ) -> None:
        super().__init__(command, dataclass_types, description)
        self._positional = tuple(positional)
        words = " ".join(f"[{name.upper()}]" for name in positional)
        self.usage = f"%(prog)s {words} [--config FILE.yaml] [--option value ...]"

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """One instance of each dataclass; see `CommandParser.parse`. Words before the first option are positional."""
        words: list[str] = []
        rest = list(argv)
        while rest and not rest[0].startswith("-") and len(words) < len(self._positional):
            words.append(rest.pop(0))
        named = [part for name, word in zip(self._positional, words, strict=False) for part in (f"--{name}", word)]
        return super().parse([*named, *rest])

    def print_help(self, file: Any = None, *, everything: bool = False) -> None:
        """Print every option."""
        self.epilog = None
        super().print_help(file, everything=True)
