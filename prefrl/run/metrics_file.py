"""The file `metrics.jsonl` of a run: one line for each log, for people, reports and other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["METRICS_FILE", "append_metrics", "read_metrics"]

METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a line. NaN and infinity, which JSON does not have, become null.

    Args:
        folder: The folder of the run.
        row: `run` (its id), `step`, `time` (seconds since 1970) and the metrics by name.

    Raises:
        OSError: The file cannot be written.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of the last run in a folder, in order.

    A run that was interrupted and resumed repeats the steps after its checkpoint; their earlier rows are left out, and
    so is a line that was cut off by a crash.

    Raises:
        OSError: There is no file, or it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not {"run", "step"} <= row.keys():
            continue  # of another program
        if rows and row["run"] != rows[-1]["run"]:
            rows = []
        # A step is logged once with its loss; evaluations of the same step follow.
        first_repeated = row["step"] if "loss" in row else row["step"] + 1
        while rows and rows[-1]["step"] >= first_repeated:
            rows.pop()
        rows.append(row)
    return rows
