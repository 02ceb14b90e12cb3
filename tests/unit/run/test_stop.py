"""Requests to stop, without a trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from prefrl.run.folder import Stopped, StopRequest


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """Of a process that nobody has told what to do at a signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_noted_and_the_second_has_its_usual_effect() -> None:
    request = StopRequest(None)
    with request.listen():
        signal.raise_signal(signal.SIGINT)
        assert request.code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    child = os.fork()
    if child == 0:
        with StopRequest(None).listen():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_wait_that_changes_nothing_is_left_at_once_also_when_the_signal_came_before_it() -> None:
    request = StopRequest(None)
    with request.listen():
        with pytest.raises(Stopped), request.interruptible():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), request.interruptible():
            pass
    with request.listen():  # of the next training
        assert request.code == 0


def test_a_handler_of_the_user_is_left_alone() -> None:
    noted = []
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    request = StopRequest(None)
    with request.listen():
        signal.raise_signal(signal.SIGTERM)
    assert (noted, request.code) == ([signal.SIGTERM], 0)


def test_the_deadline_counts_from_the_start_of_the_training() -> None:
    now = 0.0
    request = StopRequest(10.0, clock=lambda: now)
    now = 100.0
    with request.listen():
        now = 109.0
        assert request.code == 0
        now = 110.0
        assert request.code == 75
