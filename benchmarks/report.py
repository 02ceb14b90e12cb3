"""Turn measurements into ratios, verdicts, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.worker import Library, Measurement, WorkerError
from benchmarks.workloads import Gate, Workload

__all__ = [
    "HEADS",
    "Figures",
    "Report",
    "Row",
    "failed_row",
    "measured_row",
    "replace_between_markers",
    "row_of",
    "unequal_work",
]

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
HEADS = (
    "workload",
    "TRL, s",
    "prefrl, s",
    "TRL / prefrl (range)",
    "TRL, MiB",
    "prefrl, MiB",
    "TRL / prefrl",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One library on one workload, without the warm-up."""

    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    peak_mib: float
    num_tokens: int  # in each turn
    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One workload. A row with problems has no ratios."""

    name: str
    title: str
    gate: Gate
    problems: tuple[str, ...] = ()
    uses_wall: bool = False  # the clock of the ratio: wall or CPU seconds
    trl: Figures | None = None
    prefrl: Figures | None = None

    def seconds(self, library: Library) -> tuple[float, ...]:
        """The seconds of each turn, by the clock of the ratio."""
        figures = self.trl if library == "trl" else self.prefrl
        assert figures is not None
        return figures.wall_s if self.uses_wall else figures.cpu_s

    def ratios(self) -> list[float]:
        """Seconds of TRL / seconds of prefrl, for consecutive turns."""
        return [a / b for a, b in zip(self.seconds("trl"), self.seconds("prefrl"), strict=True)]

    def memory_ratio(self) -> float:
        """Peak of TRL / peak of prefrl."""
        assert self.trl is not None
        assert self.prefrl is not None
        return self.trl.peak_mib / self.prefrl.peak_mib

    def misses(self) -> list[str]:
        """The gates that were not met, with what was reached."""
        reached = {"time": (median(self.ratios()), self.gate.must), "memory": (self.memory_ratio(), self.gate.memory)}
        return [f"{name} {ratio:.2f} < {must:g}" for name, (ratio, must) in reached.items() if must and ratio < must]

    def cells(self) -> list[str]:
        """The cells of the table row, under `HEADS`."""
        if self.problems:
            return [self.title, f"**failed**: {self.problems[0].splitlines()[-1]}", *[""] * (len(HEADS) - 2)]
        assert self.trl is not None
        assert self.prefrl is not None
        ratios = self.ratios()
        return [
            self.title,
            *(f"{median(self.seconds(library)):.2f}" for library in ("trl", "prefrl")),
            f"**{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{self.trl.peak_mib:,.0f}",
            f"{self.prefrl.peak_mib:,.0f}",
            f"**{self.memory_ratio():.2f}**",
        ]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, through JSON."""
        figures = {library: content[library] and _figures_from_json(content[library]) for library in ("trl", "prefrl")}
        gate, problems = Gate(**content["gate"]), tuple(content["problems"])
        return cls(**{**content, **figures, "gate": gate, "problems": problems})


@dataclass(frozen=True)
class Report:
    """A run of the benchmark."""

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def markdown(self) -> str:
        """The table, and the machine and versions that it was measured with."""
        facts = "; ".join(f"{name} {value}" for name, value in self.environment.items())
        lines = [HEADS, ("---",) * len(HEADS), *(row.cells() for row in self.rows)]
        return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines] + ["", f"Measured on: {facts}.", ""])

    def failed(self) -> list[Row]:
        """Rows whose check failed."""
        return [row for row in self.rows if row.problems]

    def missed(self) -> list[Row]:
        """Rows with a gate that is not met."""
        return [row for row in self.rows if not row.problems and row.misses()]

    def write(self, path: Path) -> None:
        """JSON with the raw figures, and the table beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["environment"], [Row.from_json(row) for row in content["rows"]])


def row_of(workload: Workload, measured: Mapping[Library, Measurement]) -> Row:
    """A row with ratios if both libraries did the same work, otherwise one with problems."""
    problems = unequal_work(workload, measured, tolerance=1e-4)
    figures = {library: _figures(workload, measurement) for library, measurement in measured.items()}
    return Row(workload.name, workload.title, workload.gate, tuple(problems), **figures)


def measured_row(workload: Workload, found: Mapping[Library, Measurement | WorkerError]) -> Row:
    """A row of a GPU, whose clock is the wall's. It also has the figures of one library if the other failed."""
    measured = {library: value for library, value in found.items() if isinstance(value, Measurement)}
    errors = [f"{name}: {str(e).strip().splitlines()[-1]}" for name, e in found.items() if isinstance(e, WorkerError)]
    problems = errors or unequal_work(workload, measured, tolerance=3e-2)
    figures = {library: _figures(workload, measurement) for library, measurement in measured.items()}
    return Row(workload.name, workload.title, workload.gate, tuple(problems), uses_wall=True, **figures)


def failed_row(workload: Workload, error: Exception) -> Row:
    """The row of a workload that a library could not run."""
    return Row(workload.name, workload.title, workload.gate, (str(error).strip(),))


def unequal_work(workload: Workload, measured: Mapping[Library, Measurement], *, tolerance: float) -> list[str]:
    """The reasons why the two libraries did not do the workload, or not the same work.

    Args:
        workload: Tells how many tokens there are, and whether both libraries get the same inputs.
        measured: Measurements of both libraries.
        tolerance: Relative tolerance for loss and gradient norm of the first step. bf16 rounds to 3 digits.
    """
    problems = []
    for library, measurement in measured.items():
        counts = set(_token_counts(workload, measurement))
        if counts != {workload.num_tokens}:
            problems.append(f"{library} ran {sorted(counts)} tokens in a turn, not {workload.num_tokens}")
    if workload.has_equal_inputs:
        for name in ("loss", "grad_norm"):
            values = [getattr(measured[library].outcome, name) for library in ("trl", "prefrl")]
            # The loss of an on-policy step is close to 0 if completions have equal lengths.
            if None in values or not math.isclose(*values, rel_tol=tolerance, abs_tol=1e-6):
                problems.append(f"{name} differs: TRL {values[0]}, prefrl {values[1]}")
    return problems


def replace_between_markers(path: Path, text: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Put `text` between the two markers of a Markdown file.

    Raises:
        ValueError: The file does not have each marker exactly once, in this order.
    """
    content = path.read_text(encoding="utf-8")
    head, has_begin, rest = content.partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end or begin in rest or end in tail:
        raise ValueError(f"{path}: needs {begin} and then {end}, once each")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def _figures(workload: Workload, measurement: Measurement) -> Figures:
    timed = measurement.turns[1:]
    return Figures(
        cpu_s=tuple(turn.cpu_s for turn in timed),
        wall_s=tuple(turn.wall_s for turn in timed),
        peak_mib=max(turn.peak_mib for turn in measurement.turns),
        num_tokens=_token_counts(workload, measurement)[0],
        loss=measurement.outcome.loss,
        grad_norm=measurement.outcome.grad_norm,
    )


def _token_counts(workload: Workload, measurement: Measurement) -> Sequence[int]:
    if workload.is_online:
        return [turn.num_tokens for turn in measurement.turns]
    return measurement.outcome.num_tokens


def _figures_from_json(content: Mapping[str, Any]) -> Figures:
    return Figures(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})
