"""Call sync and async reward functions, each with a deadline."""

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

# Seconds that a coroutine may still take after it was canceled at its deadline, before it is abandoned.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """A reward function and its arguments."""

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
    """One event loop in a daemon thread, so that a reward's clients can stay open between calls.

    A separate thread also works where the caller's thread already runs a loop, as in a notebook.
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
        """Abandon a loop that is blocked; the next call gets a new one."""
        if self._loop is not None:
            _stop_loop(self._loop)
            self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    # Tasks that were canceled just before the loop stopped have not seen it yet.
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
    """The unchecked results of the functions. Async functions run concurrently; meanwhile the others run in sequence.

    Args:
        calls: K functions with their arguments.
        timeout: Seconds for each function; None: no limit.
        loop: Runs the async functions.
    Returns:
        K results.
    Raises:
        RewardError: A function raised or took too long. A sync function that took too long keeps running in its daemon
            thread, because a thread cannot be ended.
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
    """The place in the user's function, without prefrl's frames above it and library frames below it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" (line {frames[0].lineno} of {frames[0].filename})" if frames else ""


def _call_sync(call: Call, timeout: float | None) -> _Outcome:
    outcome = _Outcome()

    def work() -> None:
        try:
            outcome.result = call.function(**call.arguments)
        except KeyboardInterrupt:  # the user's wish, not the reward's
            raise
        except BaseException as error:  # also SystemExit, which would silently end the training
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
    except BaseException as error:  # SystemExit would end the loop's thread, and CancelledError would be lost
        return _Outcome(error=_DeadlineError() if scope.expired() else error)


def _wait(
    future: concurrent.futures.Future[list[_Outcome]],
    calls: Sequence[Call],
    timeout: float | None,
    loop: EventLoopThread,
) -> list[_Outcome]:
    try:
        return future.result(None if timeout is None else timeout + _GRACE_S)
    except TimeoutError:  # our own timeout: timeouts of the functions are in their outcomes
        loop.abandon()
        names = ", ".join(repr(call.name) for call in calls)
        raise RewardError(
            f"async rewards {names}: one of them took more than reward_timeout={timeout} s and could not be "
            "cancelled. Use `await` inside it, or make it a plain function"
        ) from None
