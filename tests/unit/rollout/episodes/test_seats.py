"""Calls of user code: each on the right thread, within its time limit, and without harm to others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from prefrl import Environment
from prefrl.rollout.episodes.environment import environment_kinds
from prefrl.rollout.episodes.seats import CallTimeout, Seat, Seats

EVENTS: list[Any] = []


class World(Environment):
    def __init__(self) -> None:
        EVENTS.append(threading.get_ident())

    def close(self) -> None:
        EVENTS.append("closed")


def run(scenario: Callable[[Seat], Coroutine[Any, Any, None]], kind: type = World) -> list[Any]:
    """Returns what the environments noted."""
    (made,) = environment_kinds(None, kind).values()
    EVENTS.clear()

    async def main() -> None:
        await asyncio.wait_for(scenario(Seat(made)), timeout=20)

    asyncio.run(main())
    return EVENTS


def test_calls_of_an_instance_are_made_on_one_thread_which_is_not_the_loops() -> None:
    async def scenario(seat: Seat) -> None:
        await seat.set_up(5)
        await seat.set_up(5)  # made once
        for _ in range(2):
            EVENTS.append(await seat.call(threading.get_ident, timeout=5))
        await seat.close(5)

    made, *called, closed = run(scenario)
    assert called == [made, made]
    assert made != threading.get_ident()
    assert closed == "closed"


def test_async_functions_and_those_that_return_an_awaitable_run_on_the_loop() -> None:
    async def where(*, add: int) -> int:
        await asyncio.sleep(0)
        return threading.get_ident() + add

    async def scenario(seat: Seat) -> None:
        for function in (where, lambda **more: where(**more)):
            assert await seat.call(function, add=1, timeout=5) == threading.get_ident() + 1
        assert seat.is_usable

    run(scenario)


def test_a_hung_call_is_abandoned_in_time_and_the_next_one_works() -> None:
    gate = threading.Event()

    async def scenario(seat: Seat) -> None:
        with pytest.raises(CallTimeout):
            await seat.call(gate.wait, timeout=0.05)
        assert not seat.is_usable
        assert await seat.call(lambda: "next", timeout=5) == "next"
        await seat.close(5)

    try:
        run(scenario)
    finally:
        gate.set()


def test_a_hung_async_call_is_canceled_and_its_seat_is_not_used_again() -> None:
    async def forever() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            EVENTS.append("canceled")
            await asyncio.sleep(1000)  # and does not care

    async def scenario(seat: Seat) -> None:
        with pytest.raises(CallTimeout):
            await seat.call(forever, timeout=0.05)
        assert not seat.is_usable
        with pytest.raises(CallTimeout):
            await seat.call(lambda: forever(), timeout=0.05)
        await asyncio.sleep(0)

    assert run(scenario) == ["canceled", "canceled"]


def test_a_call_ends_with_the_episode_that_made_it() -> None:
    async def forever() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            EVENTS.append("canceled")

    async def scenario(seat: Seat) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(seat.call(forever, timeout=None), 0.05)
        await asyncio.sleep(0)
        assert not seat.is_usable

    assert run(scenario) == ["canceled"]


def raises(error: BaseException, *, is_async: bool) -> Callable[[], Any]:
    async def in_task() -> None:
        raise error

    def in_thread() -> None:
        raise error

    return in_task if is_async else in_thread


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt("3"),
        StopIteration(3),
        asyncio.CancelledError("3"),
        concurrent.futures.CancelledError("3"),
    ],
    ids=lambda error: type(error).__module__ + type(error).__name__,
)
def test_no_error_of_a_call_ends_the_loop_or_passes_for_a_cancellation(error: BaseException, is_async: bool) -> None:
    async def scenario(seat: Seat) -> None:
        with pytest.raises(Exception, match=r"StopIteration|3"):
            await seat.call(raises(error, is_async=is_async), timeout=5)
        assert seat.is_usable
        assert await seat.call(lambda: 1, timeout=5) == 1

    run(scenario)


def test_errors_are_raised_as_they_are() -> None:
    async def scenario(seat: Seat) -> None:
        for is_async in (False, True):
            with pytest.raises(ZeroDivisionError, match=r"^mine$"):
                await seat.call(raises(ZeroDivisionError("mine"), is_async=is_async), timeout=5)

    run(scenario)


def test_seats_are_used_again_unless_a_call_has_hung_and_none_is_left_open() -> None:
    before = set(threading.enumerate())
    (kind,) = environment_kinds(None, World).values()

    async def main() -> None:
        seats = Seats(5)
        first, second = seats.take(kind), seats.take(kind)
        for seat in (first, second):
            await seat.set_up(5)
        assert first is not second
        seats.give_back(first)
        assert seats.take(kind) is first
        first.is_usable = False
        seats.give_back(first)
        third = seats.take(kind)
        assert third is not first
        await seats.close()
        seats.give_back(second)  # after the end
        await seats.close()

    EVENTS.clear()
    asyncio.run(asyncio.wait_for(main(), 20))
    assert EVENTS.count("closed") == 2  # the third was not made
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()


class Stubborn(World):
    gate: threading.Event | None = None  # None: it was only looked at

    def close(self) -> None:
        if self.gate is not None:
            self.gate.wait()


class Careless(World):
    is_used = False

    async def close(self) -> None:
        if self.is_used:
            raise OSError("no")


def test_an_environment_that_cannot_be_closed_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        seats = Seats(0.05)
        for factory in (Careless, Stubborn, Careless):
            (kind,) = environment_kinds(None, factory).values()
            seat = seats.take(kind)
            await seat.set_up(5)
            seat.environment.gate, seat.environment.is_used = gate, True
        await seats.close()

    gate = threading.Event()
    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        gate.set()
    assert sorted(record.getMessage() for record in caplog.records) == [
        *["Careless.close: OSError: no"] * 2,
        "Stubborn.close: CallTimeout: no result within 0.05 s",
    ]
