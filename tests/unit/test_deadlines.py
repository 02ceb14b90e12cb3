"""No test waits forever, and what it started ends with it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from tests.launch import launch, run
from tests.patience import before_a_deadline, is_running, wait_until

# Starts a process that waits, and waits itself.
WAITS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("it waits here", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_every_test_has_a_deadline_after_those_of_its_processes(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > inspect.signature(launch).parameters["seconds"].default
    assert pytestconfig.getini("timeout_method") == "signal"  # the other one leaves the processes behind


def test_a_command_that_takes_too_long_ends_with_all_of_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "child"

    def attempt(seconds: float) -> tuple[float, str] | None:
        with pytest.raises(AssertionError) as caught:
            run([sys.executable, "-c", WAITS, str(path)], seconds=seconds)
        return (seconds, str(caught.value)) if "it waits" in str(caught.value) else None

    seconds, words = before_a_deadline(attempt)
    assert words == f"not done after {seconds} s: it waits here\n"
    child = int(path.read_text())
    assert wait_until(lambda: not is_running(child))
