"""For tests with clocks in them: how they end the same way on a machine that stalls."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# For what must come, and comes within moments on a quiet machine.
PATIENCE = 60.0

T = TypeVar("T")


def wait_until(condition: Callable[[], bool], *, seconds: float = PATIENCE) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that has may still be in the table of processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def before_a_deadline(attempt: Callable[[float], T | None]) -> T:
    """The result of `attempt(seconds)`, where something must come before a deadline that passes for something else.

    The deadline is short, because the test waits for it. None: a stall left no time, so a longer one is tried.
    """
    for seconds in (0.2, 3.0, 40.0):
        result = attempt(seconds)
        if result is not None:
            return result
    raise AssertionError("40 s were not enough")
