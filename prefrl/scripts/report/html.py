"""The page about one run or two: a single HTML file without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from prefrl import __version__
from prefrl.printable import printable
from prefrl.scripts.report.completions import histograms_of, side_by_side
from prefrl.scripts.report.events import events_of
from prefrl.scripts.report.run import Point, read_run, series_of, thinned

__all__ = ["page"]

_FOLDER = Path(__file__).parent / "page"
_MAX_POINTS = 300  # of a curve
_MAX_METRICS = 200
_MAX_CHARACTERS = 500  # of an option's value
# Metrics whose curves come first.
_FIRST = (
    *("reward", "eval_reward", "loss", "eval_loss", "mean_token_accuracy", "rewards/accuracies", "rewards/margins"),
    *("kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "learning_rate"),
)
_NUM_FIRST = 9
# What HuggingFace logs at the end of training.
_TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")


def page(folders: Sequence[Path], *, is_live: bool = False) -> str:
    """The page.

    Args:
        folders: `output_dir` of one run, or of two that are compared.
        is_live: The page asks its server every second for what is new.

    Raises:
        ConfigError: A folder is not that of a run.
    """
    runs = [read_run(folder) for folder in folders]
    names = [printable(run.name) for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=True)]
    series = [series_of(run.rows) for run in runs]
    main = _main_metrics(series)
    metrics = _ordered(series, main)
    times = [run.times() for run in runs]
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    curves = {
        name: [[_short(point) for point in thinned(s.get(name, []), _MAX_POINTS)] for s in series] for name in metrics
    }
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"number": _number, "clock": _clock}
    text = environment.get_template("page.html").render(
        runs=runs,
        names=names,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data={"names": names, "curves": curves},
        first=main,
        others=metrics[len(main) :],
        finals=_finals(metrics, series),
        times=times,
        phases=sorted({phase for of_run in times for phase in of_run}),
        histograms=[histograms_of(run.folder) for run in runs],
        tables=side_by_side([run.folder for run in runs], names),
        events=[events_of(run) for run in runs],
        options=_table([run.config for run in runs]),
        versions=_table(
            [{**run.starts[-1].versions, "platform": run.starts[-1].platform} if run.starts else {} for run in runs]
        ),
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        is_live=is_live,
    )
    return printable(text)  # names of metrics, options and packages, and commands, come from files


def _main_metrics(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the metrics whose curves come first."""
    names = {name for of_run in series for name in of_run}
    if "reward" in names:  # the loss of a policy gradient says nothing about progress
        names -= {"loss", "eval_loss"}
    parts = sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
    return [*(name for name in _FIRST if name in names), *parts][:_NUM_FIRST]


def _ordered(series: Sequence[Mapping[str, Any]], main: Sequence[str]) -> list[str]:
    """The names of all metrics: the main ones, then the others in the order of the alphabet."""
    others = sorted({name for of_run in series for name in of_run} - {*main, *_TOTALS})
    return [*main, *others][:_MAX_METRICS]


def _short(point: Point) -> tuple[int, float]:
    return point[0], float(f"{point[1]:.5g}")


def _finals(names: Sequence[str], series: Sequence[Mapping[str, Sequence[Point]]]) -> list[dict[str, Any]]:
    """The first and last value of each metric in each run, and the difference of the last ones."""
    rows = []
    for name in names:
        of_runs = [s.get(name, []) for s in series]
        firsts = [points[0][1] if points else None for points in of_runs]
        lasts = [points[-1][1] if points else None for points in of_runs]
        known = [last for last in lasts if last is not None]
        change = known[1] - known[0] if len(known) > 1 else None
        rows.append({"name": name, "firsts": firsts, "lasts": lasts, "change": change})
    return rows


def _table(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each name: its values in all columns, and whether all columns have it with values that differ."""
    rows = []
    for name in sorted({name for column in columns for name in column}):
        values = [_text(column[name]) if name in column else "" for column in columns]
        rows.append(
            {
                "name": name,
                "values": values,
                "differs": all(name in column for column in columns) and len(set(values)) > 1,
            }
        )
    return rows


def _text(value: Any) -> str:
    return printable("null" if value is None else str(value), max_characters=_MAX_CHARACTERS)


def _clock(time: str) -> str:
    """A time in ISO 8601 as people read it; other texts as they are."""
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return time


def _number(value: float | None) -> str:
    """A number with four digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 and math.isfinite(value) else f"{value:.4g}"
