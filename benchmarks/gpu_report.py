"""The tables of docs/performance.md from benchmarks/results/gpu.json, which `docs/make_tables.py` inserts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Row

__all__ = ["markdown"]

RESULTS = Path(__file__).parent / "results" / "gpu.json"
Records = Sequence[Mapping[str, Any]]


def markdown(stage: str, path: Path = RESULTS) -> str:
    """What a stage measured, as a table, or a sentence where it has not run; `machine`: where all stages ran."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if stage == "machine":
        return f"Measured on: {'; '.join(f'{name} {value}' for name, value in content['environment'].items())}."
    held = content["stages"].get(stage)
    if held is None or not held["records"]:
        return "Not measured yet."
    return TABLES[stage](held["records"])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines)


def _plans(records: Records) -> str:
    heads = ["plan", "kernel of flat attention", "ms", "MiB", "error of log-probs", "error of gradients"]
    return _table(
        heads,
        (
            [
                f"`{record['plan']}`",
                record["kernel"] or "that of transformers",
                *(
                    [f"**failed**: {record['problem'].strip().splitlines()[-1]}", "", "", ""]
                    if "problem" in record
                    else []
                ),
                *([] if "problem" in record else _numbers(record, "ms", "mib", "logprob_error", "gradient_error")),
            ]
            for record in records
        ),
    )


def _numbers(record: Mapping[str, Any], *names: str) -> list[str]:
    return [f"{record[name]:,.0f}" if record[name] >= 100 else f"{record[name]:.2g}" for name in names]


def _steps(records: Records) -> str:
    heads = ["workload", "TRL, s", "prefrl, s", "TRL / prefrl", "TRL, GiB", "prefrl, GiB", "TRL / prefrl"]
    return _table(heads, (_step(Row.from_json(record)) for record in records))


def _step(row: Row) -> list[str]:
    both = [row.trl, row.prefrl]
    seconds = ["failed" if figures is None else f"{median(figures.wall_s):.2f}" for figures in both]
    memory = ["" if figures is None else f"{figures.peak_mib / 1024:.1f}" for figures in both]
    if row.problems:
        return [f"{row.title} ({'; '.join(row.problems)})", *seconds, "", *memory, ""]
    return [row.title, *seconds, f"**{median(row.ratios()):.2f}**", *memory, f"**{row.memory_ratio():.2f}**"]


def _doctor(records: Records) -> str:
    heads = ["algorithm", "peak, GiB", "estimated, GiB", "estimated / measured", "step, s", "lower bound, s"]
    rows = []
    for found in records:
        if "problem" in found:
            rows.append(
                [found["algorithm"], f"**failed**: {found['problem'].strip().splitlines()[-1]}", "", "", "", ""]
            )
            continue
        memory = [found["peak"] / 1024, found["estimated_peak"] / 1024]
        times = [f"{found['step']:.3f}", f"{found['least_step']:.3f}"]
        rows.append([found["algorithm"], *(f"{x:.2f}" for x in memory), f"{memory[1] / memory[0]:.2f}", *times])
    return _table(heads, rows)


def _shared(records: Records) -> str:
    """Seconds and memory of each step; the first has what is only done once."""
    held = "".join(_held(record) for record in records if "set_aside" in record)
    problems = [str(record[key]) for record in records for key in ("problem", "left_out") if key in record]
    if problems:
        return f"{held}Not measured: {problems[0].strip().splitlines()[-1]}"
    share = next(
        (f"The server had {record['share']:.2f} of the memory.\n\n" for record in records if "share" in record), ""
    )
    columns = {
        "step": "step",
        "wake_weights_s": "waking for weights, s",
        "sync_s": "whole sync, s",
        "wake_cache_s": "waking for the cache, s",
        "generation_s": "generation, s",
        "sleep_s": "falling asleep, s",
        "freed_gib": "freed, GiB",
        "held_gib": "still in use, GiB",
        "step_s": "step, s",
    }
    steps = [record for record in records if "step" in record]
    return (
        held
        + share
        + _table(
            [*columns.values()], ([f"{one[name]:.3g}" if name in one else "" for name in columns] for one in steps)
        )
    )


def _held(found: Mapping[str, Any]) -> str:
    """Whether the doctor sets enough aside: for what training holds beside its weights, and the server's context."""
    needed = found["beside_gib"] + found["libraries_gib"]
    verdict = "suffices" if needed <= found["set_aside"] else "is too little: correct `_CONTEXTS` in `resources.py`"
    return (
        f"Between its steps, training held {found['held_gib']:.2f} GiB, of which the doctor counts "
        f"{found['counted_gib']:.2f}; its CUDA context takes {found['context_gib']:.2f}, with libraries "
        f"{found['libraries_gib']:.2f}, as that of a server does. The doctor sets {found['set_aside']:.2f} GiB aside "
        f"for the rest and for the server's context, which {verdict}.\n\n"
    )


TABLES: dict[str, Callable[[Records], str]] = {
    **{"plans": _plans, "steps": _steps, "doctor": _doctor, "shared": _shared}
}
