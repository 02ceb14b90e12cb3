"""What a check says about a run, how that is printed, and what can be said of the data before torch is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import datasets
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding

from prefrl.data.formats import get_dataset_column_names
from prefrl.errors import PrefrlError, printable
from prefrl.registry import Algorithm
from prefrl.scripts.arguments.command import Given
from prefrl.scripts.inputs import datasets_of
from prefrl.scripts.schema import SchemaParser

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
        located: Adds file and line to an error, if the file of options sets what is wrong.
        console: Prints each section when it is complete; None: nothing is printed.
        sections: In the order of the checks.
    """

    located: Callable[[PrefrlError], PrefrlError] = lambda error: error
    console: Console | None = None
    sections: list[Section] = field(default_factory=list)

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
        if self.console is not None:
            _print(section, self.console)

    def count(self, level: Severity) -> int:
        """Number of findings of a level."""
        return sum(entry[0] == level for section in self.sections for entry in section.entries)

    def summary(self) -> str:
        """The number of problems and warnings."""
        return ", ".join(_counted(self.count(level), level) for level in ("problem", "warning"))


def _print(section: Section, console: Console) -> None:
    console.print(f"\n[bold]{section.title}[/]")
    for level, text in section.entries:
        console.print(f"  {_SIGNS[level]}  {escape(text)}", highlight=False, soft_wrap=not console.is_terminal)
    for shown in section.shown:
        console.print(Padding(shown, (0, 0, 0, 2)))
    console.file.flush()  # what follows takes seconds


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
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


ROWS_READ = 1000


def rows_in_memory(dataset: Any, count: int = ROWS_READ) -> datasets.Dataset | None:
    """The first rows of a dataset or stream, in memory; of several datasets, those of the first."""
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()), None)
    if dataset is None:
        return None
    if isinstance(dataset, datasets.IterableDataset):
        return datasets.Dataset.from_list(list(dataset.take(count)))
    return dataset.select(range(min(count, len(dataset))))


def check_data(checkup: Checkup, algorithm: Algorithm, given: Given) -> tuple[Any, Any]:
    """Load the data of a run and say what it consists of. Neither torch nor transformers is imported.

    Returns:
        The datasets to train on and to evaluate on, as `datasets_of` returns them; None if they cannot be loaded.
    """
    raw = evaluated = None
    config = SchemaParser(algorithm.name).check(given, knows_processes=False)
    with checkup.section("Data") as section:
        raw, evaluated = datasets_of(given.script, config)
        if raw is not None:
            _check_columns(section, raw)
    return raw, evaluated


def _check_columns(section: Section, dataset: Any) -> None:
    """Say what the dataset consists of, and which pairs have equal sides."""
    size = "a stream" if isinstance(dataset, datasets.IterableDataset) else _counted(len(dataset), "row")
    section.ok(f"{size} with the columns {', '.join(get_dataset_column_names(dataset))}")
    rows = rows_in_memory(dataset)
    if rows is None or not {"chosen", "rejected"} <= set(rows.column_names):
        return
    equal = [i for i, row in enumerate(rows) if row["chosen"] == row["rejected"]]
    if equal:
        section.warn(f"{len(equal)} of {len(rows)} pairs have chosen = rejected; the first is row {equal[0]}")
