"""Reads what a run's folder holds, without torch: metrics, options, versions, the commands that started it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError
from prefrl.printable import masked, printable
from prefrl.run.checkpoints import step_of
from prefrl.run.records import IDENTITY, METRICS_FILE, Identity, Start, read_identity, read_metrics, read_starts

__all__ = ["Point", "RunRecord", "read_run", "series_of", "thinned"]

_TIME = re.compile(r"time/(\w+)_s")
_NOT_METRICS = ("step", "epoch", "stage", "run", "time")

Point = tuple[int, float]  # optimizer step, value


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it."""

    folder: Path
    identity: Identity | None
    rows: list[dict[str, Any]]  # logged metrics, with "step", which never goes down
    config: dict[str, Any]  # options by name, without secrets
    starts: list[Start]
    num_steps: int | None  # optimizer steps that are planned

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.resolve().name

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the registry; empty if it is not known."""
        return str(self.identity.decisive.get("algorithm", "")) if self.identity else ""

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row["step"] for row in self.rows), default=0)

    def times(self) -> dict[str, float]:
        """The mean seconds that each phase took in an optimizer step, the longest first."""
        phases: dict[str, list[float]] = {}
        for row in self.rows:
            for key, value in row.items():
                found = _TIME.fullmatch(key)
                if found and "step_time" in row and _is_finite(value):
                    phases.setdefault(found[1], []).append(value)
        means = {name: sum(values) / len(values) for name, values in phases.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. A run that is under way can be read, too.

    Args:
        folder: `output_dir`.

    Raises:
        ConfigError: It is not the folder of a run.
    """
    checkpoint = _last_checkpoint(folder)
    identity = read_identity(folder) or (read_identity(checkpoint) if checkpoint else None)
    if identity is None and checkpoint is None and not (folder / METRICS_FILE).is_file():
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run: it has no {IDENTITY}, {METRICS_FILE} or checkpoint-N. Pass "
            "the output_dir of a run."
        )
    state = _json(checkpoint / "trainer_state.json") if checkpoint else {}
    rows = read_metrics(folder) if (folder / METRICS_FILE).is_file() else state.get("log_history", [])
    arguments = _json(folder / "training_args.json") or (
        _json(checkpoint / "training_args.json") if checkpoint else {}
    )
    decisive = identity.decisive if identity else {}
    planned = state.get("max_steps") or arguments.get("max_steps") or -1
    return RunRecord(
        folder,
        identity,
        rows,
        masked({**decisive, **arguments}),
        read_starts(folder, identity.run) if identity else [],
        planned if planned > 0 else None,
    )


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The finite values of each metric with their steps; names have no control characters."""
    series: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_METRICS and _is_finite(value):
                series.setdefault(printable(name), []).append((row["step"], value))
    return series


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of as many neighbors each as are needed, and the last point as it is."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    *parts, last = [points[i : i + size] for i in range(0, len(points) - 1, size)] + [points[-1:]]
    means = [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts]
    return [*means[: limit - 1], *last]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _last_checkpoint(folder: Path) -> Path | None:
    steps = [(step_of(path.name), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    known = [(step, path) for step, path in steps if step is not None]
    return max(known)[1] if known else None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
