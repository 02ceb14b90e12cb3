"""Call reward functions, sync and async, each with a deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefrl.errors import PrefrlError, RewardError

__all__ = ["Call", "EventLoopThread", "call_all", "is_async"]

# What a coroutine that was cancelled at its deadline may still take until it is given up.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """A reward function and what it is given."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    is_async: bool


@dataclass(slots=True)
class _Outcome:
    result: object = None
    error: BaseException | None = None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an `async def`, a partial of one, or an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class EventLoopThread:
    """One event loop in a daemon thread, so that clients that a reward keeps open outlive a call.

    A thread of its own also works where the caller's thread has a running loop, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, list[_Outcome]]) -> concurrent.futures.Future[list[_Outcome]]:
        """Run a coroutine in the loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="prefrl-rewards", daemon=True).start()
            weakref.finalize(self, _stop_loop, self._loop)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def abandon(self) -> None:
        """Leave a loop that something blocks; the next call gets a new one."""
        if self._loop is not None:
            _stop_loop(self._loop)
            self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    # What was cancelled just before the stop has yet to take notice of it.
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def call_all(calls: Sequence[Call], *, timeout: float | None, loop: EventLoopThread) -> list[object]:
    """What the functions return, unchecked. Async ones run together, and meanwhile the others one after another.

    Args:
        calls: K functions with their arguments.
        timeout: Seconds for each function; None: no limit.
        loop: Where async functions run.
    Returns:
        K results.
    Raises:
        RewardError: A function raised or took too long. A sync function that took too long goes on in its daemon
            thread, for a thread cannot be ended.
    """
    waiting = [call for call in calls if call.is_async]
    future = loop.submit(_gather(waiting, timeout)) if waiting else None
    try:
        results = {id(call): _result(call, _call_sync(call, timeout), timeout) for call in calls if not call.is_async}
        if future is not None:
            outcomes = _wait(future, waiting, timeout, loop)
            results |= {id(c): _result(c, outcome, timeout) for c, outcome in zip(waiting, outcomes, strict=True)}
    finally:
        if future is not None:
            future.cancel()
    return [results[id(call)] for call in calls]


def _result(call: Call, outcome: _Outcome, timeout: float | None) -> object:
    error = outcome.error
    if error is None:
        return outcome.result
    if isinstance(error, PrefrlError):
        raise error
    if isinstance(error, _DeadlineError):
        raise RewardError(
            f"reward {call.name!r} took more than reward_timeout={timeout} s for one batch. Make it faster, or raise "
            "reward_timeout; None means no limit"
        )
    raise RewardError(
        f"reward {call.name!r} raised {type(error).__name__}: {error}{_place(error)}. For a row that a reward cannot "
        "score, let it return None"
    ) from error


class _DeadlineError(Exception):
    pass


def _place(error: BaseException) -> str:
    """Where in the user's function it happened, not how we called it nor how deep in a library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" (line {frames[0].lineno} of {frames[0].filename})" if frames else ""


def _call_sync(call: Call, timeout: float | None) -> _Outcome:
    outcome = _Outcome()

    def work() -> None:
        try:
            outcome.result = call.function(**call.arguments)
        except KeyboardInterrupt:  # the user's wish, not the reward's
            raise
        except BaseException as error:  # also SystemExit, which would end the training without a word
            outcome.error = error

    if timeout is None:
        work()
        return outcome
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name=f"reward {call.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    return _Outcome(error=_DeadlineError()) if thread.is_alive() else outcome


async def _gather(calls: Sequence[Call], timeout: float | None) -> list[_Outcome]:
    return await asyncio.gather(*(_call_async(call, timeout) for call in calls))


async def _call_async(call: Call, timeout: float | None) -> _Outcome:
    try:
        async with asyncio.timeout(timeout) as scope:
            return _Outcome(result=await call.function(**call.arguments))
    except BaseException as error:  # SystemExit and CancelledError would end the loop's thread or never arrive
        return _Outcome(error=_DeadlineError() if scope.expired() else error)


def _wait(
    future: concurrent.futures.Future[list[_Outcome]],
    calls: Sequence[Call],
    timeout: float | None,
    loop: EventLoopThread,
) -> list[_Outcome]:
    try:
        return future.result(None if timeout is None else timeout + _GRACE_S)
    except TimeoutError:  # ours: those of the functions are in their outcomes
        loop.abandon()
        names = ", ".join(repr(call.name) for call in calls)
        raise RewardError(
            f"async rewards {names}: one of them took more than reward_timeout={timeout} s and did not let itself "
            "be cancelled. Await inside it, or make it a plain function"
        ) from None
