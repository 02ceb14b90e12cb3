"""Calls of user code: each on the right thread, within its time limit, and without harm to others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl import Environment
from prefrl.rewards.call import EventLoopThread
from prefrl.rollout.episodes.environment import CallTimeout, Seat, Seats, environment_kinds
from prefrl.rollout.episodes.threads import MainThread, Worker
from tests.launch import run_module
from tests.patience import PATIENCE

EVENTS: list[Any] = []


class World(Environment):
    def __init__(self) -> None:
        EVENTS.append(threading.get_ident())

    def close(self) -> None:
        EVENTS.append("closed")


def run(scenario: Callable[[Seat], Coroutine[Any, Any, None]], kind: type = World) -> list[Any]:
    """Returns what the environments noted."""
    EVENTS.clear()
    (made,) = environment_kinds(None, kind).values()

    async def main() -> None:
        await asyncio.wait_for(scenario(Seat(made, MainThread())), timeout=PATIENCE)

    asyncio.run(main())
    return EVENTS


def test_the_thread_of_an_instance_ends_with_it() -> None:
    worker = Worker()
    thread = worker.submit(threading.current_thread).result(PATIENCE)
    assert thread.is_alive()
    del worker
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_calls_of_an_instance_are_made_on_one_thread_which_is_not_the_loops() -> None:
    async def scenario(seat: Seat) -> None:
        other = Seat(seat.kind, MainThread())  # the first one has the instance that was looked at
        for one in (seat, other):
            await one.set_up(PATIENCE)
            await one.set_up(PATIENCE)  # made once
            for _ in range(2):
                EVENTS.append(await one.call(threading.get_ident, timeout=PATIENCE))
            await one.close(PATIENCE)

    first, *called, closed, second, third, fourth, again = run(scenario)
    assert called == [first, first]
    assert second == third == fourth
    assert len({first, second, threading.get_ident()}) == 3
    assert closed == again == "closed"


def test_async_functions_and_those_that_return_an_awaitable_run_on_the_loop() -> None:
    async def where(*, add: int) -> int:
        await asyncio.sleep(0)
        return threading.get_ident() + add

    async def scenario(seat: Seat) -> None:
        for function in (where, lambda **more: where(**more)):
            assert await seat.call(function, add=1, timeout=PATIENCE) == threading.get_ident() + 1
        assert seat.is_usable

    run(scenario)


def test_a_hung_call_is_abandoned_in_time_and_the_next_one_works() -> None:
    gate = threading.Event()

    async def scenario(seat: Seat) -> None:
        with pytest.raises(CallTimeout):
            await seat.call(gate.wait, timeout=0.05)
        assert not seat.is_usable
        assert await seat.call(lambda: "next", timeout=PATIENCE) == "next"
        await seat.close(PATIENCE)

    try:
        run(scenario)
    finally:
        gate.set()


def hang() -> None:
    """Run by a process of its own."""
    os.dup2(1, 2)  # no error goes unseen
    loop, seat = EventLoopThread(), Seat(SimpleNamespace(make=None, unused=[], is_full=False), MainThread())
    try:
        loop.submit(seat.call(threading.Event().wait, timeout=0.1)).result()
    except CallTimeout as error:
        print(error)
    loop.submit(seat.close(1)).result()


def test_a_process_with_a_hung_call_ends() -> None:
    assert run_module(__name__, seconds=5 * PATIENCE) == "no result within 0.1 s\n"


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

    assert run(scenario)[1:] == ["canceled", "canceled"]


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

    assert run(scenario)[1:] == ["canceled"]


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
            await seat.call(raises(error, is_async=is_async), timeout=PATIENCE)
        assert seat.is_usable
        assert await seat.call(lambda: 1, timeout=PATIENCE) == 1

    run(scenario)


def test_errors_are_raised_as_they_are() -> None:
    async def scenario(seat: Seat) -> None:
        for is_async in (False, True):
            with pytest.raises(ZeroDivisionError, match=r"^mine$"):
                await seat.call(raises(ZeroDivisionError("mine"), is_async=is_async), timeout=PATIENCE)

    run(scenario)


def test_seats_are_used_again_unless_a_call_has_hung_and_none_is_left_open(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    (kind,) = environment_kinds(None, World).values()
    assert len(kind.unused) == 1

    async def main() -> None:
        seats = Seats(MainThread(), PATIENCE)
        first, second = seats.take(kind), seats.take(kind)
        for seat in (first, second):
            await seat.set_up(PATIENCE)
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
    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert EVENTS.count("closed") == 2  # the third was not made
    assert not caplog.records
    for thread in {*threading.enumerate()} - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_function_that_handles_signals_is_called_on_the_main_thread_at_once_from_then_on() -> None:
    def limited() -> int:
        EVENTS.append(threading.get_ident())
        with_signal = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, with_signal)
        return 3

    def wrong() -> None:
        raise ValueError("mine")

    (kind,) = environment_kinds(None, World).values()
    main_thread, loop = MainThread(), EventLoopThread()
    woken = threading.Event()
    main_thread.wake = woken.set
    seat = Seat(kind, main_thread)
    EVENTS.clear()
    for number in (2, 1):
        result = loop.submit(seat.call(limited, timeout=PATIENCE))
        assert woken.wait(PATIENCE)
        woken.clear()
        main_thread.attend()
        assert result.result(PATIENCE) == 3
        assert len(EVENTS) == number
        assert EVENTS.pop() == threading.get_ident()
        EVENTS.clear()
    with pytest.raises(ValueError, match="mine"):
        loop.submit(seat.call(wrong, timeout=PATIENCE)).result(PATIENCE)
    loop.submit(seat.close(PATIENCE)).result(PATIENCE)


def test_a_signal_that_arrives_in_such_a_call_ends_the_wait() -> None:
    class Stop(BaseException): ...

    def raising(error: BaseException) -> None:
        raise error

    main_thread = MainThread()
    exits = main_thread.submit(raising, lambda: raising(SystemExit(3)))
    stopped = main_thread.submit(raising, lambda: raising(Stop()))
    with pytest.raises(Stop):
        main_thread.attend()
    assert [str(result.exception(0)) for result in (exits, stopped)] == ["SystemExit: 3", "Stop:"]


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
        seats = Seats(MainThread(), 0.05)
        for factory in (Careless, Stubborn, Careless):
            (kind,) = environment_kinds(None, factory).values()
            seat = seats.take(kind)
            await seat.set_up(PATIENCE)
            seat.environment.gate, seat.environment.is_used = gate, True
        await seats.close()

    gate = threading.Event()
    try:
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
    finally:
        gate.set()
    assert sorted(record.getMessage() for record in caplog.records) == [
        *["Careless.close: OSError: no"] * 2,
        "Stubborn.close: CallTimeout: no result within 0.05 s",
    ]


if __name__ == "__main__":
    hang()
