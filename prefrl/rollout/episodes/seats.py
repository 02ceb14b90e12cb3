"""Instances of environments, and calls of user code with deadlines: a call that hangs never holds up anything else."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefrl.rollout.episodes.threads import MainThread, Worker

if TYPE_CHECKING:
    from prefrl.rollout.episodes.environment import EnvironmentKind

__all__ = ["CallTimeout", "Seat", "Seats"]


class CallTimeout(Exception):
    """A call of user code took too long."""


class Seat:
    """A place for one episode at a time: an instance of an environment, and the thread of its calls.

    Args:
        kind: The environment's; without one there are only functions to call.
        main_thread: Calls functions that handle signals.
    """

    def __init__(self, kind: EnvironmentKind, main_thread: MainThread) -> None:
        self.kind = kind
        self._main_thread = main_thread
        self.is_usable = True  # False once a call has hung or the environment has failed
        self.environment: Any = None
        if kind.unused:
            self.environment, self._worker = kind.unused.pop()
        else:
            self._worker = Worker()

    async def set_up(self, timeout: float | None) -> None:
        """Make the environment, if it does not exist yet."""
        if self.environment is None and self.kind.make is not None:
            self.environment = await self.call(self.kind.make, timeout=timeout)

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        """What a function returns: an async one on this loop, another one on the seat's thread.

        A function that handles signals, as Python only allows on the main thread, is called there, without a limit.

        Raises:
            CallTimeout: It took too long. It is left alone, and the seat has a new thread.
        """
        if inspect.iscoroutinefunction(function):
            return await _within(asyncio.ensure_future(function(*args, **kwargs)), timeout)
        work = functools.partial(function, *args, **kwargs)
        try:
            value = await self._sync(function, work, timeout)
        except (CallTimeout, asyncio.CancelledError):
            self._abandon()
            raise
        return await _within(asyncio.ensure_future(value), timeout) if inspect.isawaitable(value) else value

    async def _sync(self, function: Callable[..., Any], work: Callable[[], Any], timeout: float | None) -> Any:
        if not self._main_thread.is_needed_by(function):
            try:
                return await _within(asyncio.wrap_future(self._worker.submit(work)), timeout)
            except ValueError as error:
                if not self._main_thread.is_meant_by(error):
                    raise
        return await asyncio.wrap_future(self._main_thread.submit(function, work))

    def _abandon(self) -> None:
        self.is_usable = False
        self._worker.leave()
        self._worker = Worker()

    async def close(self, timeout: float | None) -> None:
        """Close the environment, if it is a `prefrl.Environment`, and end the thread."""
        try:
            if self.environment is not None and self.kind.is_full:
                await self.call(self.environment.close, timeout=timeout)
        finally:
            self._worker.leave()


class Seats:
    """The seats that are free, by kind. An instance is made when none is free, and used again afterwards.

    It is only used on the loop's thread.

    Args:
        main_thread: Calls functions that handle signals.
    """

    def __init__(self, main_thread: MainThread) -> None:
        self._main_thread = main_thread
        self._free: dict[int, list[Seat]] = {}  # by identity of the kind
        self._all: set[Seat] = set()

    def take(self, kind: EnvironmentKind) -> Seat:
        """A free seat, or a new one."""
        free = self._free.setdefault(id(kind), [])
        if free:
            return free.pop()
        seat = Seat(kind, self._main_thread)
        self._all.add(seat)
        return seat

    async def give_back(self, seat: Seat, timeout: float | None) -> None:
        """Make a seat free, or close it if it cannot be used any more."""
        if seat.is_usable:
            self._free[id(seat.kind)].append(seat)
            return
        self._all.discard(seat)
        await seat.close(timeout)

    async def close(self, timeout: float | None) -> None:
        """Close all seats, each within the time limit; errors are not raised, because nothing depends on them."""
        closing = [seat.close(timeout) for seat in self._all]
        self._all, self._free = set(), {}
        await asyncio.gather(*closing, return_exceptions=True)


async def _within(future: asyncio.Future[Any], timeout: float | None) -> Any:
    """The result of a future, which is canceled after the time limit. Nothing waits for it to notice."""
    done, _ = await asyncio.wait({future}, timeout=timeout)
    if done:
        return future.result()
    future.cancel()
    raise CallTimeout
