"""Processes that are started together and must end together, including the processes that they started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prefrl.generation.server import KEY_VARIABLE

__all__ = ["Program", "StopNote", "kill_all", "of_session", "stop_signals_noted", "with_variable"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Program:
    """A command, and its environment variables in addition to those of this process."""

    command: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        shown = {name: value for name, value in self.environment.items() if name != KEY_VARIABLE}
        return shlex.join([*(f"{name}={value}" for name, value in shown.items()), *self.command])


class StopNote:
    """The last signal that asked this process to end, if any."""

    signal: signal.Signals | None = None


@contextlib.contextmanager
def stop_signals_noted() -> Iterator[StopNote]:
    """Inside this context, signals that would end the program are only noted, so that no step is left half done."""
    noted = StopNote()

    def note(number: int, _frame: object) -> None:
        noted.signal = signal.Signals(number)

    heeded = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as by nohup
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def of_session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in parentheses, which may contain anything, come state, parent, group and session.
            state, _, _, its_session = (
                path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            )
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The processes with this environment variable that have not ended, in any session."""
    entry = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill_all(find: Callable[[], list[int]], *, seconds: float) -> None:
    """Kill processes until none is found.

    Args:
        find: Lists the remaining processes.
        seconds: Time after which the rest is left alone: a process that is blocked in the kernel cannot be killed.
    """
    deadline = time.monotonic() + seconds
    while (living := find()) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
