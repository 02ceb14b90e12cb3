from __future__ import annotations

import os

import pytest

from benchmarks.worker import Machine, Worker, WorkerError
from tests.unit.benchmarks.conftest import tiny

MACHINE = Machine("cpu", (min(os.sched_getaffinity(0)),))


def test_a_process_takes_its_turns_and_sends_what_it_logged() -> None:
    with Worker(tiny("sft"), "prefrl", machine=MACHINE, num_turns=2) as worker:
        turns = [worker.turn(), worker.turn()]
        outcome = worker.outcome()
    assert outcome.num_tokens == (18, 18)
    assert all(0 < turn.cpu_s < 60 for turn in turns)


def test_a_process_that_fails_says_why() -> None:
    workload = tiny("dpo", options={"beta": -1.0})
    with (
        Worker(workload, "prefrl", machine=MACHINE, num_turns=1) as worker,
        pytest.raises(WorkerError, match="beta=-1"),
    ):
        worker.turn()


def test_a_process_that_dies_is_reported() -> None:
    with Worker(tiny("sft"), "prefrl", machine=MACHINE, num_turns=2) as worker:
        worker.turn()
        worker._process.kill()
        with pytest.raises(WorkerError, match="ended with code -9"):
            worker.turn()
