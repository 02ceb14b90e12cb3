"""Threads on which user code runs, and a watch over it.

Code that blocks the event loop of episodes is told of: then no time limit of a call can end it.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from prefrl import distributed
from prefrl.errors import EpisodeError, reason_of
from prefrl.rewards.call import EventLoopThread

# Other exceptions come from signals.
_OF_USER_CODE = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)


_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Worker:
    """A thread that calls functions one after another. It does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        run = distributed.on_own_gpu(_make_calls)
        threading.Thread(target=run, args=(self._calls,), name="prefrl-environment", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)  # the thread, which knows the queue alone, ends with the worker

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function on the thread."""
        result: Future[Any] = Future()
        self._calls.put((result, function))
        return result

    def leave(self) -> None:
        """End the thread after the call that it is in."""
        self._calls.put(None)


def _make_calls(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        result, function = call
        if result.set_running_or_notify_cancel():
            _settle(result, function)
        del call, result, function  # while it waits, the thread keeps nothing


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


# How often the loop is looked at, within the time limit.
_NUM_LOOKS = 5


class LoopWatch:
    """Finds that one step of a task takes longer than allowed.

    Another thread looks at the loop again and again. While none does, no time counts: training may hold up the loop.

    Args:
        loop: Runs the tasks.
        limit: Seconds.
    """

    def __init__(self, loop: EventLoopThread, *, limit: float) -> None:
        self._loop, self._limit = loop, limit
        self.interval = limit / _NUM_LOOKS  # how often to look, in seconds
        self._place: tuple[asyncio.AbstractEventLoop, int] | None = None  # the loop and its thread, once it runs
        self._looked = time.monotonic()
        self._begin(None)

    def _begin(self, task: asyncio.Task[object] | None) -> None:
        self._sign = self._loop.submit(_place())  # done as soon as the loop has run what it had to run
        self._task, self._blocked = task, 0.0

    def look(self) -> EpisodeError | None:
        """What user code did wrong; None: nothing."""
        seconds = time.monotonic() - self._looked
        if seconds < self.interval / 2:
            return None
        self._looked += seconds
        self._place = self._sign.result() if self._sign.done() else self._place
        task = asyncio.current_task(self._place[0]) if self._place is not None else None
        if self._sign.done() or task is not self._task:
            self._begin(task)
            return None
        self._blocked += min(seconds, self.interval)
        if self._blocked < self._limit:
            return None
        return _error(self._limit, "it does not start" if self._place is None else _where(self._place[1]))


@contextmanager
def watched_loop(watch: LoopWatch, *, report: Callable[[EpisodeError], None]) -> Iterator[None]:
    """Look at a loop from a thread of its own.

    Args:
        watch: Of the loop.
        report: Called once if the loop is blocked, on the other thread.
    """
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(watch, report, is_over), name="prefrl-watchdog", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _watch(watch: LoopWatch, report: Callable[[EpisodeError], None], is_over: threading.Event) -> None:
    while not is_over.wait(watch.interval):
        if (error := watch.look()) is not None:
            return report(error)
    return None


async def _place() -> tuple[asyncio.AbstractEventLoop, int]:
    return asyncio.get_running_loop(), threading.get_ident()


def _where(thread: int) -> str:
    """What a thread is doing."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    return f"line {stack[-1].lineno} of {stack[-1].filename}" if stack else "it has ended"


def _error(seconds: float, where: str) -> EpisodeError:
    return EpisodeError(
        f"the event loop of the episodes has been blocked for {seconds:g} s ({where}): an async function of a tool or "
        "an environment does not yield, so time limits have no effect. Use await in it, or make it a plain function, "
        "which runs in a thread"
    )
