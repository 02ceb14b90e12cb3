"""Threads on which user code runs."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from prefrl import distributed
from prefrl.printable import reason_of

__all__ = ["MainThread", "Worker", "reported"]


# Other exceptions come from signals.
_OF_USER_CODE = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)


class Worker:
    """A thread that calls functions one after another. It does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        run = distributed.on_own_gpu(self._run)
        threading.Thread(target=run, name="prefrl-environment", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function on the thread."""
        result: Future[Any] = Future()
        self._calls.put((result, function))
        return result

    def leave(self) -> None:
        """End the thread after the call that it is in."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, function = call
            if not result.set_running_or_notify_cancel():
                continue
            _settle(result, function)


def _settle(result: Future[Any], function: Callable[[], Any]) -> None:
    """Set a future to what a function returns or raises."""
    try:
        value = function()
    except BaseException as error:  # also SystemExit: user code must not end the thread that others wait for
        result.set_exception(reported(error))
    else:
        result.set_result(value)


class MainThread:
    """Calls functions that handle signals. Only the main thread may, and it does so while it waits for episodes."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._functions: set[Any] = set()  # that are known to need it
        # Wakes the main thread, which is set before it waits.
        self.wake: Callable[[], None] = lambda: None

    @staticmethod
    def is_meant_by(error: ValueError) -> bool:
        """Whether an error says that a function may only be called on the main thread."""
        return "signal only works in main thread" in str(error)

    def is_needed_by(self, function: Callable[..., Any]) -> bool:
        """Whether a function is known to need the main thread."""
        return getattr(function, "__func__", function) in self._functions

    def submit(self, function: Callable[..., Any], work: Callable[[], Any]) -> Future[Any]:
        """Call `work`, which calls the function, on the main thread, from now on at once."""
        self._functions.add(getattr(function, "__func__", function))
        result: Future[Any] = Future()
        self._calls.put((result, work))
        self.wake()
        return result

    def attend(self) -> None:
        """Make the calls that wait; called by the main thread."""
        while not self._calls.empty():
            result, work = self._calls.get()
            if not result.set_running_or_notify_cancel():
                continue
            _settle(result, work)
            error = result.exception()
            cause = error.__cause__ if error is not None else None
            if cause is not None and not isinstance(cause, _OF_USER_CODE):
                raise cause


def reported(error: BaseException) -> Exception:
    """The error as one that may be raised in a task.

    SystemExit would end the loop, StopIteration cannot be set as the result of a future, and CancelledError would pass
    for the end of the episode.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    reported = RuntimeError(reason_of(error))
    reported.__cause__ = error
    return reported
