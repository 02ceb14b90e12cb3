"""How a test starts several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from tests.forks import Fork, Forks

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 40.0
# What the processes of trainings import.
_IMPORTED = ("tests.imported",)
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}

Process = subprocess.Popen[bytes] | Fork


def launch(module: str, *arguments: str | Path, result: Path, num_processes: int = 2, seconds: float = 900) -> Any:
    """What rank 0 of `module` stored with `torch.save`.

    Args:
        module: Run with `arguments`: in each of several processes, or alone.
        result: The file that rank 0 writes.
        seconds: Until all processes are ended, if they have not. Workers have deadlines of their own, and say where
            they wait; this one is for what they cannot see.
    """
    run_ranks(module, *arguments, num_processes=num_processes, seconds=seconds)
    return torch.load(result)


def run_ranks(module: str, *arguments: str | Path, num_processes: int = 2, seconds: float = 900) -> None:
    """`launch` without a result."""
    if num_processes == 1:
        run_module(module, *arguments, seconds=seconds)
    else:
        run_module("tests.ranks", str(num_processes), module, *arguments, seconds=seconds)


def run_module(module: str, *arguments: str | Path, seconds: float = 900) -> str:
    """`run` of a module, in a fork of a process that has imported the trainers."""

    def start(output: IO[bytes], errors: IO[bytes]) -> Fork:
        environment = os.environ | _ONE_THREAD
        return _forks().start(module, [*map(str, arguments)], environment=environment, output=output, errors=errors)

    return _run(start, seconds)


@cache
def _forks() -> Forks:
    return Forks(sys.executable, _IMPORTED, os.environ | _ONE_THREAD)


def run(command: Sequence[str], *, seconds: float = 900, environment: dict[str, str] | None = None) -> str:
    """What a command wrote to standard output. None of its processes outlives the call, however it ends.

    Raises:
        AssertionError: It failed, or was not done in time; the message is the end of what it wrote to standard error.
    """
    variables = os.environ | (environment or {})

    def start(output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=errors, start_new_session=True)

    return _run(start, seconds)


def _run(start: Callable[[IO[bytes], IO[bytes]], Process], seconds: float) -> str:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(output, errors)
        try:
            code = process.wait(seconds)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds} s"
        finally:  # also where the test itself is ended
            _end(process)
        output.seek(0)
        errors.seek(0)
        assert not problem, f"{problem}: {errors.read().decode(errors='replace')[-6000:]}"
        return output.read().decode()


def _end(process: Process) -> None:
    """End it and what is left of its session."""
    process.terminate()  # a command ends its servers then, which have sessions of their own
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
