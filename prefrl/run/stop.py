"""Ends a training before it is done, at a signal or a deadline, so that it can be resumed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["DEADLINE", "StopRequest", "Stopped", "leave"]

# Exit code after `max_train_time`: EX_TEMPFAIL of sysexits.h, "try again". A signal's is 128 + its number.
DEADLINE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised out of a wait for completions or rewards when a signal asks to stop."""


class StopRequest:
    """Whether this process has been asked to stop.

    The first signal is noted; whoever runs the training asks for `code` between steps. Within `interruptible`, it also
    raises `Stopped` at once. The second signal has its usual effect.

    Args:
        max_seconds: Deadline, counted from `listen`; None: no deadline.
        clock: Returns seconds, never goes back.
    """

    def __init__(self, max_seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._started = clock()
        self._signal: int | None = None
        self._interruptible = False

    @property
    def code(self) -> int:
        """The exit code that was asked for; 0: nobody has asked to stop."""
        if self._signal is not None:
            return 128 + self._signal
        is_over = self._max_seconds is not None and self._clock() - self._started >= self._max_seconds
        return DEADLINE if is_over else 0

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Context in which signals are noted. A handler that a user has installed is left alone."""
        self._started, self._signal = self._clock(), None
        usual: dict[int, Any] = {
            number: handler
            for number in _SIGNALS
            if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
        }
        if threading.current_thread() is not threading.main_thread():
            usual = {}  # only the main thread can install handlers
        self._usual = usual
        for number in usual:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self._signal = number
        name = signal.Signals(number).name
        when = "now" if self._interruptible else "after this step"
        sys.stderr.write(f"{name}: saving a checkpoint {when}; the next {name} stops immediately\n")
        if self._interruptible:
            raise Stopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context of a wait that changes nothing: a signal ends it at once.

        Raises:
            Stopped: A signal asked to stop.
        """
        if self._signal is not None:
            raise Stopped
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


def leave(code: int) -> NoReturn:
    """End the process with an exit code; after Ctrl-C, with KeyboardInterrupt."""
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(code)
