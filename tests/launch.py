"""How a test starts several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 40.0


def launch(
    module: str,
    *arguments: str | Path,
    result: Path,
    num_processes: int = 2,
    seconds: float = 900,
    environment: dict[str, str] | None = None,
) -> Any:
    """What rank 0 of `module` stored with `torch.save`.

    Args:
        module: Run with `arguments`: in each of several processes, or alone.
        result: The file that rank 0 writes.
        seconds: Until all processes are ended, if they have not. Workers have deadlines of their own, and say where
            they wait; this one is for what they cannot see.
        environment: More variables.
    """
    run_ranks(module, *arguments, num_processes=num_processes, seconds=seconds, environment=environment)
    return torch.load(result)


def run_ranks(
    module: str,
    *arguments: str | Path,
    num_processes: int = 2,
    seconds: float = 900,
    environment: dict[str, str] | None = None,
) -> None:
    """`launch` without a result."""
    ranks = ["tests.ranks", str(num_processes)] if num_processes > 1 else []
    run(
        [sys.executable, "-m", *ranks, module, *map(str, arguments)],
        seconds=seconds,
        environment={"OMP_NUM_THREADS": "1"} | (environment or {}),
    )


def run(command: Sequence[str], *, seconds: float = 900, environment: dict[str, str] | None = None) -> str:
    """What a command wrote to standard output. None of its processes outlives the call, however it ends.

    Raises:
        AssertionError: It failed, or was not done in time; the message is the end of what it wrote to standard error.
    """
    variables, pipe = os.environ | (environment or {}), subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
            problem = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds} s"
            _end(process)
            output, errors = process.communicate(timeout=SECONDS_TO_END)
        finally:  # also where the test itself is ended
            _end(process)
    assert not problem, f"{problem}: {errors[-6000:]}"
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """End it and what is left of its session."""
    process.terminate()  # a command ends its servers then, which have sessions of their own
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
