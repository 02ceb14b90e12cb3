"""How the time and memory of a GRPO step grow in prefrl and TRL 1.16, along four axes from one base point.

    make bench-growth                        measure and draw: about 5 minutes on 2 cores
    python -m benchmarks.growth --plot-only  draw the stored measurements again

The step is the loss step of `python -m benchmarks`: completions are given, and a point is valid only if both libraries
did the same work. Each point has a warm-up and one timed turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS, environment_of, run_workloads
from benchmarks.report import Report, Row
from benchmarks.worker import LIBRARIES, Library, Measurement, measure, prepare_environment
from benchmarks.workloads import CPU_WORKLOADS, LENGTHS, Gate, Workload
from prefrl.errors import require

__all__ = ["AXES", "Axis", "Point", "draw", "figure_of", "lengths_of", "main", "workload_at", "workloads"]

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "growth.svg"
LINES: dict[Library, dict[str, Any]] = {
    "trl": {"label": "TRL 1.16", "color": "#b5541c", "marker": "s"},
    "prefrl": {"label": "prefrl", "color": "#1f5fa8", "marker": "o"},
}
# Glyphs as paths look the same everywhere. With the salt, ids and thus the whole file depend only on the figures.
STYLE = {"svg.fonttype": "path", "svg.hashsalt": "growth", "font.size": 9, "xtick.labelsize": 8}


@dataclass(frozen=True, slots=True)
class Point:
    """The sizes of a step with one prompt; the defaults are the base point."""

    num_completions: int = 8
    prompt_length: int = 256
    completion_length: int = 128  # of the longest completion
    vocab_size: int = 8192

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"g{self.num_completions}_p{self.prompt_length}_t{self.completion_length}_v{self.vocab_size}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A column of the figure: one size varies, the others are those of the base point."""

    size: str  # field of `Point`
    title: str
    values: tuple[int, ...]

    def points(self) -> list[Point]:
        """The points of the axis, in the order of its values."""
        return [replace(Point(), **{self.size: value}) for value in self.values]


AXES = (
    Axis("num_completions", "completions of the prompt", (2, 4, 8, 16, 32)),
    Axis("prompt_length", "prompt, tokens", (64, 256, 512, 1024, 2048)),
    Axis("completion_length", "longest completion, tokens", (64, 128, 256, 512, 1024)),
    Axis("vocab_size", "vocabulary", (8192, 32768, 65536, 151936)),
)


def lengths_of(point: Point) -> tuple[int, ...]:
    """[G] lengths, spread over `LENGTHS` from its shortest to its longest and scaled to the point's longest."""
    last, gaps = len(LENGTHS) - 1, point.num_completions - 1
    picked = (LENGTHS[round(number * last / gaps)] for number in range(point.num_completions))
    return tuple(length * point.completion_length // LENGTHS[-1] for length in picked)


def workload_at(point: Point) -> Workload:
    """The main benchmark's loss step with the sizes of the point."""
    base = next(workload for workload in CPU_WORKLOADS if workload.name == "grpo_loss")
    return replace(
        base,
        name=point.name,
        title=f"G {point.num_completions}, prompt {point.prompt_length:,}, "
        f"completions up to {point.completion_length:,}, vocabulary {point.vocab_size:,}",
        model=replace(base.model, vocab_size=point.vocab_size),
        lengths=lengths_of(point),
        prompt_length=point.prompt_length,
        gate=Gate(),
    )


def workloads() -> list[Workload]:
    """All points of all axes; the base point, which lies on each, once."""
    return [workload_at(point) for point in dict.fromkeys(point for axis in AXES for point in axis.points())]


def main(
    arguments: Sequence[str] | None = None,
    *,
    measure: Callable[..., dict[Library, Measurement]] = measure,
    results: Path = RESULTS,
    figure: Path = FIGURE,
) -> int:
    """Return 1, without a figure, if a library could not run a point or the two did not do the same work there."""
    options = _parse(arguments)
    stored = results / "growth.json"
    if not options.plot_only:
        report = Report(environment_of(options))
        report.rows.extend(run_workloads(workloads(), options, measure))
        report.write(stored)
    report = Report.read(stored)
    for row in report.failed():
        print(f"FAILED {row.name}: {'; '.join(row.problems)}", file=sys.stderr)
    if report.failed():
        return 1
    draw(report, figure)
    print(f"Raw figures: {stored}. Figure: {figure}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="points at a time, each on a core of its own")
    parser.add_argument("--plot-only", action="store_true", help="run nothing; draw what the last run stored")
    # Other options that the main benchmark's scheduler reads.
    parser.set_defaults(device="cpu", threads=1, turns=1, quick=False)
    return parser.parse_args(arguments)


def draw(report: Report, path: Path) -> None:
    """The figure as SVG; the same report gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with require("matplotlib", extra="plot", feature="benchmarks.growth").rc_context(STYLE):
        figure_of(report).savefig(path, metadata={"Date": None})


def figure_of(report: Report) -> Any:
    """A matplotlib figure: seconds above peak memory, a column for each axis, a line for each library."""
    rows = {row.name: row for row in report.rows}
    matplotlib = require("matplotlib.figure", extra="plot", feature="benchmarks.growth")
    figure = matplotlib.Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for axis, (seconds, memory) in zip(AXES, panels.T, strict=True):
        measured = [rows[point.name] for point in axis.points()]
        _plot(seconds, axis, {library: [row.seconds(library)[0] for row in measured] for library in LIBRARIES})
        _plot(memory, axis, {library: [_peak_mib(row, library) for row in measured] for library in LIBRARIES})
        memory.set_xlabel(axis.title)
    panels[0, 0].set_ylabel("CPU seconds of a step")
    panels[1, 0].set_ylabel("peak memory of a step, MiB")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def _plot(panel: Any, axis: Axis, values: dict[Library, list[float]]) -> None:
    """Draw both lines, and between their ends the ratio of the upper to the lower value."""
    for library, line in values.items():
        panel.plot(axis.values, line, markersize=4, **LINES[library])
    for end, side in ((0, "left"), (-1, "right")):
        trl, prefrl = values["trl"][end], values["prefrl"][end]
        panel.text(axis.values[end], (trl * prefrl) ** 0.5, f"{trl / prefrl:.1f}x", ha=side, va="center", size=8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(axis.values, [f"{value:,}" for value in axis.values])
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.minorticks_off()
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _peak_mib(row: Row, library: Library) -> float:
    figures = row.trl if library == "trl" else row.prefrl
    assert figures is not None
    return figures.peak_mib


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
        prepare_environment(cache=folder)
        raise SystemExit(main())
