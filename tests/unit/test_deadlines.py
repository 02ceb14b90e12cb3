"""No test waits forever, and what it started ends with it."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path

import pytest

from tests.launch import launch, run

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
    with pytest.raises(AssertionError, match=r"not done after 2 s: it waits here"):
        run([sys.executable, "-c", WAITS, str(tmp_path / "child")], seconds=2)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_running(child):
        time.sleep(0.02)
    assert not is_running(child)


def is_running(process: int) -> bool:
    """Whether it has not ended; one that has may still be in the table of processes."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
