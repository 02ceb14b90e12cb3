"""Finds out that user code blocks the event loop of episodes: then no time limit of a call can end it."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from prefrl.errors import EpisodeError
from prefrl.rewards.call import EventLoopThread

__all__ = ["watched_loop"]

# How often the loop is looked at, within the time limit.
_NUM_LOOKS = 5


@contextmanager
def watched_loop(loop: EventLoopThread, *, limit: float, report: Callable[[EpisodeError], None]) -> Iterator[None]:
    """Look at a loop from another thread, and report that one step of a task takes longer than allowed.

    Args:
        loop: Runs the tasks.
        limit: Seconds.
        report: Called once, on the other thread.
    """
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(loop, limit, report, is_over), name="prefrl-watchdog", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _watch(
    loop: EventLoopThread, limit: float, report: Callable[[EpisodeError], None], is_over: threading.Event
) -> None:
    try:
        running, thread = loop.submit(_place()).result(timeout=limit)
    except TimeoutError:
        return report(_error(limit, "it does not start"))
    sign: Future[None] | None = None
    blocking: asyncio.Task[object] | None = None
    num_looks = 0
    while not is_over.wait(limit / _NUM_LOOKS):
        task = asyncio.current_task(running)
        if sign is None or sign.done() or task is not blocking:
            sign, blocking, num_looks = loop.submit(_sign()), task, 0
            continue
        num_looks += 1
        if num_looks == _NUM_LOOKS:
            return report(_error(limit, _where(thread)))
    return None


async def _place() -> tuple[asyncio.AbstractEventLoop, int]:
    return asyncio.get_running_loop(), threading.get_ident()


async def _sign() -> None:
    """Done as soon as the loop has run what it had to run."""


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
