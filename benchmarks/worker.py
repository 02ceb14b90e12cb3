"""One process for each workload and library, and the parent process that lets them take turns.

Processes that take turns are forked from a server that has imported everything, so that they start at once with the
same libraries. Importing them may initialize CUDA, which does not survive a fork: a process that has the device to
itself imports them on its own, while those before it still run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.workloads import Workload

__all__ = [
    "LIBRARIES",
    "Library",
    "Machine",
    "Measurement",
    "Outcome",
    "Turn",
    "Worker",
    "WorkerError",
    "measure",
    "measure_one_by_one",
    "prepare_environment",
]

Library = Literal["trl", "prefrl"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
_PATIENCE_S = 3600.0  # for one turn: a large model on a busy machine
_FAREWELL_S = 10.0
_NUM_AHEAD = 3  # processes that import what they need while another one runs
_SIDES: dict[Library, str] = {"trl": "benchmarks.trl_side", "prefrl": "benchmarks.prefrl_side"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and cores that a process runs on."""

    device: str  # cpu or cuda
    cores: tuple[int, ...]  # it runs only on these, with a thread for each


@dataclass(frozen=True, slots=True)
class Turn:
    """One timed piece of work."""

    cpu_s: float  # of all threads of the process
    wall_s: float
    num_tokens: int  # completion tokens of GRPO; 0 for tasks whose trainers log their tokens
    peak_mib: float  # above what was held before the first turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a library logged."""

    loss: float | None = None  # of the first optimizer step
    grad_norm: float | None = None
    num_tokens: tuple[int, ...] = ()  # of each optimizer step, by the library's own count


@dataclass(frozen=True, slots=True)
class Measurement:
    """One library on one workload; the first turn is the warm-up."""

    turns: tuple[Turn, ...]
    outcome: Outcome


class WorkerError(Exception):
    """A worker process failed; the message is its traceback."""


def prepare_environment(cache: str) -> None:
    """Set environment variables of the processes. Must be called before the first of them starts.

    Args:
        cache: An empty folder, so that no results of an earlier run are used.
    """
    os.environ.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        HF_HOME=cache,
        TOKENIZERS_PARALLELISM="false",
        PYTHONWARNINGS="ignore",
    )


class Worker:
    """The parent's end of one process.

    Args:
        waits: Whether it is not forked, and builds its model and trainer, which takes memory, only after `build`.
    Raises:
        WorkerError: From any method, if the process failed.
    """

    def __init__(
        self, workload: Workload, library: Library, *, machine: Machine, num_turns: int, waits: bool = False
    ) -> None:
        context: Any = multiprocessing.get_context("spawn" if waits else "forkserver")
        if not waits:
            context.set_forkserver_preload(["benchmarks.preload"])
        self._connection, theirs = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="prefrl-bench-")
        arguments = (theirs, workload, library, machine, num_turns, self._folder.name, waits)
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()

    def build(self) -> None:
        """Let the process that waits build its model and trainer."""
        with suppress(ConnectionError):  # a process that failed has left its message
            self._connection.send(None)

    def turn(self) -> Turn:
        """Let the process take a turn, and wait for its end."""
        with suppress(ConnectionError):
            self._connection.send(None)
        return self._receive()  # type: ignore[no-any-return]

    def outcome(self) -> Outcome:
        """What the library logged; available after the last turn."""
        return self._receive()  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(_FAREWELL_S)
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(_PATIENCE_S):
                raise WorkerError(f"no answer within {_PATIENCE_S} s")
            message = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise WorkerError(f"the process ended with code {self._process.exitcode}") from None
        if isinstance(message, WorkerError):
            raise message
        return message


def measure(workload: Workload, *, num_turns: int, machine: Machine) -> dict[Library, Measurement]:
    """Measure a warm-up and `num_turns` turns of each library, in alternation.

    Raises:
        WorkerError: A library failed.
    """
    arguments: dict[str, Any] = {"machine": machine, "num_turns": num_turns + 1}
    with Worker(workload, "trl", **arguments) as trl, Worker(workload, "prefrl", **arguments) as prefrl:
        workers = dict(zip(LIBRARIES, (trl, prefrl), strict=True))
        turns: dict[Library, list[Turn]] = {library: [] for library in LIBRARIES}
        for _ in range(num_turns + 1):
            for library, worker in workers.items():
                turns[library].append(worker.turn())
        return {library: Measurement(tuple(turns[library]), worker.outcome()) for library, worker in workers.items()}


def measure_one_by_one(
    workloads: Iterable[Workload], *, machine: Machine
) -> Iterator[tuple[Workload, Library, Measurement | WorkerError]]:
    """Measure each library on each workload in a process that has the device to itself."""
    jobs = iter([(workload, library) for workload in workloads for library in LIBRARIES])
    with ExitStack() as stack:
        waiting: deque[tuple[Workload, Library, Worker]] = deque()
        while True:
            while len(waiting) <= _NUM_AHEAD and (job := next(jobs, None)) is not None:
                worker = Worker(*job, machine=machine, num_turns=job[0].turns + 1, waits=True)
                waiting.append((*job, stack.enter_context(worker)))
            if not waiting:
                return
            workload, library, worker = waiting.popleft()
            with worker:
                found = _measured(worker, workload.turns + 1)
            yield workload, library, found


def _measured(worker: Worker, num_turns: int) -> Measurement | WorkerError:
    worker.build()
    try:
        turns = tuple(worker.turn() for _ in range(num_turns))
        return Measurement(turns, worker.outcome())
    except WorkerError as error:
        return error


def _serve(
    connection: Connection,
    workload: Workload,
    library: Library,
    machine: Machine,
    num_turns: int,
    folder: str,
    waits: bool,
) -> None:
    """Body of the process: build the library's job, take turns, and send the outcome."""
    os.sched_setaffinity(0, machine.cores)
    try:
        if waits:
            logging.disable(logging.WARNING)
            import_module(_SIDES[library])
            connection.recv()
        connection.send(_run(connection, workload, library, machine, num_turns, folder))
    except (EOFError, ConnectionError):
        return  # the parent has gone
    except Exception:
        connection.send(WorkerError(traceback.format_exc()))


def _run(
    connection: Connection, workload: Workload, library: Library, machine: Machine, num_turns: int, folder: str
) -> Outcome:
    import torch

    from benchmarks.inputs import TokenCounter
    from benchmarks.job import Setup
    from benchmarks.meter import TurnMeter

    torch.set_num_threads(len(machine.cores))
    counter = TokenCounter()
    meter = TurnMeter(connection, num_turns=num_turns, device=machine.device, count_tokens=lambda: counter.total)
    setup = Setup(workload, meter, counter, folder, machine.device, num_turns)
    return import_module(_SIDES[library]).build(setup)()  # type: ignore[no-any-return]
