"""One process for each workload and library, and the parent process that lets two of them take turns.

Each process is forked from a server that has imported everything, so that it starts at once with the same libraries.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from contextlib import suppress
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
    "prepare_environment",
]

Library = Literal["trl", "prefrl"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
_PATIENCE_S = 3600.0  # for one turn: a large model on a busy machine
_FAREWELL_S = 10.0
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

    Raises:
        WorkerError: From any method, if the process failed.
    """

    def __init__(self, workload: Workload, library: Library, *, machine: Machine, num_turns: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.preload"])
        self._connection, theirs = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="prefrl-bench-")
        arguments = (theirs, workload, library, machine, num_turns, self._folder.name)
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()

    def turn(self) -> Turn:
        """Let the process take a turn, and wait for its end."""
        with suppress(ConnectionError):  # a process that failed has left its message
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


def _serve(
    connection: Connection, workload: Workload, library: Library, machine: Machine, num_turns: int, folder: str
) -> None:
    """Body of the process: build the library's job, take turns, and send the outcome."""
    os.sched_setaffinity(0, machine.cores)
    try:
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
