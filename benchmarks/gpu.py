"""Everything that only a GPU can tell, in one command: `make gpu`, or

    python -m benchmarks.gpu --minutes 10
    python -m benchmarks.gpu --only steps --output figures.json
    python -m benchmarks.gpu --rehearse

Stages run one after another, the most important first, each in processes of its own and with a deadline. Whatever a
stage measures is in the JSON file at once, so a run that is cut has left all that it found. `--rehearse` runs every
stage on a CPU with tiny sizes: its figures mean nothing, but a mistake shows before a GPU is at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.__main__ import output_of, version_of

__all__ = ["STAGES", "Results", "Stage", "main"]

_LAST_WORDS_S = 3.0
RESULTS = Path(__file__).parent / "results" / "gpu.json"
PACKAGES = ("prefrl", "torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "torchao", "triton")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run, a function in `benchmarks.gpu_stages`."""

    minutes: float  # deadline
    what: str


STAGES = {
    "tests": Stage(8, "the tests that are marked gpu"),
    "plans": Stage(3, "time, memory and error of each forward plan with each attention kernel"),
    "steps": Stage(12, "steps and generation beside TRL"),
    "doctor": Stage(4, "what the doctor says of memory and time, beside measurements"),
    "shared": Stage(8, "what training holds, and steps with a vLLM server on the same GPU, which sleeps meanwhile"),
}


class Results:
    """The JSON file. Each call replaces it as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, environment: dict[str, str], stages: Sequence[str]) -> None:
        """Forget earlier figures of these stages, and keep the others if they are of the same machine and commit."""
        old = self._read()
        kept = old["stages"] if old.get("environment") == environment else {}
        self._write({"environment": environment, "stages": {k: v for k, v in kept.items() if k not in stages}})

    def start(self, stage: str) -> None:
        """From now on, records are this stage's."""
        self._change(stage, {"state": "running", "seconds": 0.0, "records": []})

    def add(self, stage: str, record: dict[str, Any]) -> None:
        """Keep what a stage has measured."""
        held = self._read()["stages"][stage]
        self._change(stage, {**held, "records": [*held["records"], record]})

    def end(self, stage: str, state: str, seconds: float) -> None:
        """Note how a stage ended: complete, cut by its deadline, or failed."""
        self._change(stage, {**self._read()["stages"][stage], "state": state, "seconds": round(seconds, 1)})

    def _change(self, stage: str, content: dict[str, Any]) -> None:
        held = self._read()
        self._write({**held, "stages": {**held["stages"], stage: content}})

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {"stages": {}}  # type: ignore[no-any-return]

    def _write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a stage failed or a test did; a stage that was cut has not failed."""
    options = _parse(arguments)
    results = Results(options.output)
    if options.stage:
        return _run_here(options, results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stage that runs is ended, too
    end = time.monotonic() + 60 * options.minutes
    results.begin(_environment(rehearses=options.rehearse), options.only)
    states = []
    for name in options.only:
        seconds = min(60 * STAGES[name].minutes, end - time.monotonic())
        print(f"== {name}: {STAGES[name].what}; at most {max(seconds, 0):.0f} s", flush=True)
        states.append(_run(name, options, results, seconds))
        print(f"== {name}: {states[-1]}", flush=True)
    print(f"Figures: {options.output}")
    return int("failed" in states)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="of all stages together")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=[*STAGES], help="some of the stages")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="of the steps, see `workloads.py`")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: in benchmarks/results, or in runs to rehearse"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    default = Path("runs/gpu-rehearsal.json") if options.rehearse else RESULTS
    options.output = (options.output or default).resolve()  # a stage may work in another folder
    return options


def _run(name: str, options: argparse.Namespace, results: Results, seconds: float) -> str:
    """Run a stage in a process, end it and its children at the deadline, and say how it ended."""
    if seconds <= 0:
        return "left out"
    results.start(name)
    start = time.monotonic()
    process = subprocess.Popen(_command(name, options, seconds), start_new_session=True)
    try:
        state = "failed" if process.wait(seconds) else "complete"
    except subprocess.TimeoutExpired:
        state = "cut"
    finally:
        _kill_group(process)
    results.end(name, state, time.monotonic() - start)
    return state


def _command(name: str, options: argparse.Namespace, seconds: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--output", str(options.output)]
    command += ["--workloads", *options.workloads] if options.workloads else []
    return [*command, "--minutes", str(seconds / 60), *(["--rehearse"] if options.rehearse else [])]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The stage, and processes that it has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_here(options: argparse.Namespace, results: Results) -> int:
    from benchmarks import gpu_stages

    faulthandler.dump_traceback_later(60 * options.minutes - _LAST_WORDS_S)  # where it is when it is cut
    has_failed = False

    def record(found: dict[str, Any]) -> None:
        nonlocal has_failed
        results.add(options.stage, found)
        print(json.dumps(found), flush=True)
        has_failed |= bool(found.get("problem") or found.get("problems"))

    # A server that is cut off would stay: its stage ends it before.
    chosen = {"steps": {"names": options.workloads}, "shared": {"minutes": options.minutes}}.get(options.stage, {})
    getattr(gpu_stages, options.stage)(record, rehearses=options.rehearse, **chosen)
    return int(has_failed)


def _environment(*, rehearses: bool) -> dict[str, str]:
    name = "a CPU, to rehearse" if rehearses else output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    facts = {
        "date": date.today().isoformat(),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "machine": name,
        "python": platform.python_version(),
    }
    return facts | {package: version_of(package) for package in PACKAGES}


if __name__ == "__main__":
    sys.exit(main())
