"""Instances of environments, and calls of user code with deadlines: a call that hangs never holds up anything else."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from prefrl.printable import reason_of

if TYPE_CHECKING:
    from prefrl.rollout.episodes.environment import EnvironmentKind

__all__ = ["CallTimeout", "Seat", "Seats"]

logger = logging.getLogger(__name__)


class CallTimeout(Exception):
    """A call of user code took too long."""


class _Worker:
    """A thread that calls functions one after another. It does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="prefrl-environment", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
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
            try:
                value = function()
            except BaseException as error:  # also SystemExit: user code must not end the thread that others wait for
                result.set_exception(_reported(error))
            else:
                result.set_result(value)


class Seat:
    """A place for one episode at a time: an instance of an environment, and the thread of its calls.

    Args:
        kind: The environment's; without one there are only functions to call.
    """

    def __init__(self, kind: EnvironmentKind) -> None:
        self.kind = kind
        self.environment: Any = None
        self.is_usable = True  # False once a call has hung or the environment has failed
        self._worker = _Worker()

    async def set_up(self, timeout: float | None) -> None:
        """Make the environment, if it does not exist yet."""
        if self.environment is None and self.kind.make is not None:
            self.environment = await self.call(self.kind.make, timeout=timeout)

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        """What a function returns: an async one on this loop, another one on the seat's thread.

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
            value = await asyncio.wrap_future(self._worker.submit(lambda: function(*args, **kwargs)))
            return await value if inspect.isawaitable(value) else value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _reported(error) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise _reported(error) from error

    def _abandon(self, work: asyncio.Task[Any]) -> None:
        """Leave a call alone. Nothing waits for it to notice."""
        work.cancel()
        work.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else asks for its error
        self.is_usable = False
        self._worker.leave()
        self._worker = _Worker()

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
        timeout: Seconds for closing an environment.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._free: dict[int, list[Seat]] = {}  # by identity of the kind
        self._all: set[Seat] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, kind: EnvironmentKind) -> Seat:
        """A free seat, or a new one."""
        free = self._free.setdefault(id(kind), [])
        if free:
            return free.pop()
        seat = Seat(kind)
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


def _reported(error: BaseException) -> Exception:
    """The error as one that may be raised in a task.

    SystemExit would end the loop, StopIteration cannot be set as the result of a future, and CancelledError would pass
    for the end of the episode.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    reported = RuntimeError(reason_of(error))
    reported.__cause__ = error
    return reported
