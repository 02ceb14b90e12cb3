"""Compare prefrl with TRL 1.16 on equal work, each through its own trainers.

    make bench             all workloads, about 9 minutes on 2 cores
    make bench QUICK=1     the main ones, about 2 minutes
    python -m benchmarks --only dpo sft
    python -m benchmarks --write-docs

A workload runs in two processes, one for each library, which take turns on the same core. Ratios are medians over
pairs of turns, of CPU seconds. Peak memory is measured above what was held before the first
step. A ratio is printed only if both libraries ran the same tokens and, on the same inputs, their first loss and
gradient norm agree; otherwise the run fails. TRL runs with its fastest settings: without gradient checkpointing and
without bf16. `benchmarks.gpu` has the workloads of a GPU.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.report import Report, Row, failed_row, replace_between_markers, row_of
from benchmarks.worker import Library, Machine, Measurement, WorkerError, measure, prepare_environment
from benchmarks.workloads import CPU_WORKLOADS, Workload

Measure = Callable[..., dict[Library, Measurement]]
RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs" / "performance.md"


def main(arguments: Sequence[str] | None = None, *, measure: Measure = measure, results: Path = RESULTS) -> int:
    """Return 1 if a workload failed, because a library could not run it or the two did not do the same work."""
    options = _parse(arguments)
    stored = results / "cpu.json"
    if options.write_docs:
        replace_between_markers(DOCS, Report.read(stored).markdown())
        return 0
    workloads = _select(options)
    is_part = len(workloads) < len(CPU_WORKLOADS) or options.quick
    path = options.output or (stored.with_stem("cpu-part") if is_part else stored)
    report = Report(environment_of(options))
    report.rows.extend(run_workloads(workloads, options, measure))
    report.write(path)
    print(f"\n{report.markdown()}")
    missed = [f"{row.name} ({', '.join(row.misses())})" for row in report.missed()]
    print(f"Gates missed: {', '.join(missed) or 'none'}. Raw figures: {path}")
    for row in report.failed():
        print(f"FAILED {row.name}: {'; '.join(row.problems)}", file=sys.stderr)
    return int(bool(report.failed()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [workload.name for workload in CPU_WORKLOADS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="the main workloads, with fewer turns")
    parser.add_argument("--turns", type=int, help="timed pairs of each workload, instead of the table's number")
    parser.add_argument("--threads", type=int, default=1, help="of each process, each on a core of its own")
    parser.add_argument("--jobs", type=int, default=2, help="workloads at a time")
    parser.add_argument("--output", type=Path, help="JSON file; default: in benchmarks/results")
    parser.add_argument("--write-docs", action="store_true", help="run nothing; put the last full run into the docs")
    return parser.parse_args(arguments)


def _select(options: argparse.Namespace) -> list[Workload]:
    workloads = [w for w in CPU_WORKLOADS if options.only is None or w.name in options.only]
    if options.quick and options.only is None:
        workloads = [workload for workload in workloads if workload.quick_turns]
    return workloads


def run_workloads(workloads: Sequence[Workload], options: argparse.Namespace, measure: Measure) -> list[Row]:
    """The rows in the order of the workloads. A line is printed when a workload is done."""
    free: queue.SimpleQueue[Machine] = queue.SimpleQueue()
    machines = _machines(options)
    for machine in machines:
        free.put(machine)

    def run(workload: Workload) -> Row:
        machine = free.get()
        try:
            num_turns = options.turns or (options.quick and workload.quick_turns) or workload.turns
            row = row_of(workload, measure(workload, num_turns=num_turns, machine=machine))
        except WorkerError as error:
            row = failed_row(workload, error)
        finally:
            free.put(machine)
        print("| " + " | ".join(row.cells()) + " |", flush=True)
        return row

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(run, workloads))


def _machines(options: argparse.Namespace) -> list[Machine]:
    """The cores of each of the workloads that run at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= options.threads <= len(cores):
        raise SystemExit(f"--threads {options.threads}: there are {len(cores)} cores")
    jobs = min(options.jobs, len(cores) // options.threads)
    parts = (cores[i * options.threads : (i + 1) * options.threads] for i in range(jobs))
    return [Machine("cpu", tuple(part)) for part in parts]


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    facts = {
        "date": date.today().isoformat(),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "machine": _processor(),
        "threads": str(options.threads),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "python": sys.version.partition(" ")[0],
    }
    return facts | {name: version_of(name) for name in ("prefrl", "trl", "torch", "transformers")}


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unknown CPU'}"


def output_of(*command: str) -> str:
    """The first line that a command prints here, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def version_of(package: str) -> str:
    """The installed version of a package, or "missing"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="prefrl-bench-") as folder:
        prepare_environment(cache=folder)
        raise SystemExit(main())
