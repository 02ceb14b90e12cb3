"""Processes that are started together and must end together, whatever they started themselves."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prefrl.generation.vllm.guard import KEY_VARIABLE

__all__ = ["Program", "StopNote", "kill_all", "of_session", "stop_signals_noted", "with_variable"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Program:
    """A command, and the environment variables that it gets besides those of this process."""

    command: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        shown = {name: value for name, value in self.environment.items() if name != KEY_VARIABLE}
        return shlex.join([*(f"{name}={value}" for name, value in shown.items()), *self.command])


class StopNote:
    """The last signal that asked this process to end; None: there was none."""

    signal: signal.Signals | None = None


@contextlib.contextmanager
def stop_signals_noted() -> Iterator[StopNote]:
    """Signals that end a program only leave a note inside, so that nothing is left half started or half ended."""
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
    """Processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in brackets, which may hold anything: state, parent, group, session.
            state, _, _, its_session = (
                path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            )
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def with_variable(name: str, value: str) -> list[int]:
    """Processes that were started with an environment variable and have not ended, in whatever session they are."""
    entry = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill_all(find: Callable[[], list[int]], *, seconds: float) -> None:
    """End processes by force until none is found.

    Args:
        find: Lists those that are left.
        seconds: After which the rest is left alone: a process in the kernel cannot be ended.
    """
    deadline = time.monotonic() + seconds
    while (living := find()) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
