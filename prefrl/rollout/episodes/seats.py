"""Instances of environments, and calls of user code with deadlines: a call that hangs never holds up anything else."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefrl.printable import reason_of
from prefrl.rollout.episodes.threads import MainThread, Worker, reported

if TYPE_CHECKING:
    from prefrl.rollout.episodes.environment import EnvironmentKind

__all__ = ["CallTimeout", "Seat", "Seats"]

logger = logging.getLogger(__name__)


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
            RuntimeError: It raised something that would end the loop, such as SystemExit.
        """
        work = asyncio.create_task(self._called(function, args, kwargs), name=_name_of(function))
        try:
            await asyncio.wait({work}, timeout=timeout)
        finally:
            is_late = not work.done()
            if is_late:  # or the episode is over, so that nobody waits for the call any more
                self._abandon(work)
        if is_late:
            raise CallTimeout(f"no result within {timeout} s")
        return work.result()

    async def _called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            value = await self._sync(function, functools.partial(function, *args, **kwargs))
            return await value if inspect.isawaitable(value) else value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise reported(error) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise reported(error) from error

    async def _sync(self, function: Callable[..., Any], work: Callable[[], Any]) -> Any:
        if not self._main_thread.is_needed_by(function):
            try:
                return await asyncio.wrap_future(self._worker.submit(work))
            except ValueError as error:
                if not self._main_thread.is_meant_by(error):
                    raise
        return await asyncio.wrap_future(self._main_thread.submit(function, work))

    def _abandon(self, work: asyncio.Task[Any]) -> None:
        """Leave a call alone. Nothing waits for it to notice."""
        work.cancel()
        work.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else asks for its error
        self.is_usable = False
        self._worker.leave()
        self._worker = Worker()

    async def close(self, timeout: float | None) -> None:
        """Close the environment, if it is a `prefrl.Environment`, and end the thread."""
        environment, self.environment = self.environment, None
        try:
            if environment is not None and self.kind.is_full:
                await self.call(environment.close, timeout=timeout)
        finally:
            self._worker.leave()


class Seats:
    """The seats that are free, by kind. An instance is made when none is free, and used again afterwards.

    It is only used on the loop's thread.

    Args:
        main_thread: Calls functions that handle signals.
        timeout: Seconds for closing an environment.
    """

    def __init__(self, main_thread: MainThread, timeout: float | None) -> None:
        self._main_thread = main_thread
        self._timeout = timeout
        self._free: dict[int, list[Seat]] = {}  # by identity of the kind
        self._all: set[Seat] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, kind: EnvironmentKind) -> Seat:
        """A free seat, or a new one."""
        free = self._free.setdefault(id(kind), [])
        if free:
            return free.pop()
        seat = Seat(kind, self._main_thread)
        self._all.add(seat)
        return seat

    def give_back(self, seat: Seat) -> None:
        """Make a seat free, or close it if it cannot be used any more."""
        if seat.is_usable and seat in self._all:
            self._free[id(seat.kind)].append(seat)
        else:
            self.drop(seat)

    def drop(self, seat: Seat) -> None:
        """Begin to close a seat that is not used any more."""
        self._all.discard(seat)
        closing = asyncio.create_task(self._close(seat))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all seats, each within the time limit."""
        for seat in tuple(self._all):
            self.drop(seat)
        self._free = {}
        await asyncio.gather(*self._closing)

    async def _close(self, seat: Seat) -> None:
        try:
            await seat.close(self._timeout)
        except Exception as error:  # of the environment; nothing depends on it
            logger.warning("%s.close: %s", seat.kind.name, reason_of(error))


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
