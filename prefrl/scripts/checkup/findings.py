"""What a check found, and how it is printed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import datasets

from prefrl.errors import PrefrlError
from prefrl.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Checkup", "Section", "logged_into"]

Severity = Literal["ok", "note", "warning", "problem"]
_SIGNS: dict[Severity, str] = {
    "ok": "[green]ok[/]",
    "note": "[dim]note[/]",
    "warning": "[yellow]warning[/]",
    "problem": "[bold red]problem[/]",
}


@dataclass
class Section:
    """The findings about one thing, such as the data."""

    title: str
    entries: list[tuple[Severity, str]] = field(default_factory=list)
    shown: list[RenderableType] = field(default_factory=list)  # below the entries

    def ok(self, text: str) -> None:
        """Something is as it should be."""
        self._add("ok", text)

    def note(self, text: str) -> None:
        """Something that could not be checked, or is good to know."""
        self._add("note", text)

    def warn(self, text: str) -> None:
        """The run would go on, but perhaps not as intended."""
        self._add("warning", text)

    def problem(self, text: str) -> None:
        """The run would fail."""
        self._add("problem", text)

    def _add(self, level: Severity, text: str) -> None:
        """Once, without the control characters that names of columns and models may have."""
        entry = (level, printable(text))
        if entry not in self.entries:
            self.entries.append(entry)


@dataclass
class Checkup:
    """All sections.

    Args:
        sections: In the order of the checks.
        located: Adds file and line to an error, if the file of options sets what is wrong.
    """

    sections: list[Section] = field(default_factory=list)
    located: Callable[[PrefrlError], PrefrlError] = lambda error: error

    @contextmanager
    def section(self, title: str) -> Iterator[Section]:
        """A section to fill. An error that prefrl raises inside is a problem of it, and what it logs a warning."""
        section = Section(title)
        self.sections.append(section)
        try:
            with logged_into(section):
                yield section
        except PrefrlError as error:
            section.problem(str(self.located(error)))
        except ImportError as error:
            section.problem(str(error))

    def count(self, level: Severity) -> int:
        """Number of findings of a level."""
        return sum(entry[0] == level for section in self.sections for entry in section.entries)

    def print(self, console: Console) -> None:
        """Print all sections, and the number of problems and warnings."""
        from rich.markup import escape
        from rich.padding import Padding

        for section in self.sections:
            console.print(f"\n[bold]{section.title}[/]")
            for level, text in section.entries:
                console.print(f"  {_SIGNS[level]}  {escape(text)}", highlight=False, soft_wrap=not console.is_terminal)
            for shown in section.shown:
                console.print(Padding(shown, (0, 0, 0, 2)))
        problems, warnings = self.count("problem"), self.count("warning")
        console.print(f"\n{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}")


@contextmanager
def logged_into(section: Section) -> Iterator[None]:
    """Turns what prefrl logs into warnings of the innermost section, and shows no progress bars of datasets."""
    handler, logger = _IntoSection(section), logging.getLogger("prefrl")
    outer = [each for each in logger.handlers if isinstance(each, _IntoSection)]
    propagates, logger.propagate = logger.propagate, False
    shows_bars = not datasets.are_progress_bars_disabled()
    for each in outer:
        logger.removeHandler(each)
    logger.addHandler(handler)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for each in outer:
            logger.addHandler(each)
        logger.propagate = propagates
        if shows_bars:
            datasets.enable_progress_bars()


class _IntoSection(logging.Handler):
    """Turns what is logged into warnings of a section."""

    def __init__(self, section: Section) -> None:
        super().__init__(logging.WARNING)
        self._section = section

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record."""
        self._section.warn(record.getMessage())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
