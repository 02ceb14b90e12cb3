"""What one process measures of itself, and how it waits for its turn."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from benchmarks.worker import Turn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["HostMemory", "MeterCallback", "TurnMeter"]


class TurnMeter:
    """Starts a turn when the parent allows it and reports it when it is done."""

    def __init__(
        self, connection: Connection, *, num_turns: int, device: str, count_tokens: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._turns_left = num_turns
        self._memory = _CudaMemory() if device == "cuda" else HostMemory()
        self._count_tokens = count_tokens  # completion tokens since the process began
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._tokens = 0
        self._cpu = self._wall = 0.0

    def begin(self) -> None:
        """Everything is built: what is held now is not counted."""
        self._memory.reset()
        self._wait()

    def end_turn(self) -> None:
        """Report, and wait for the next turn if there is one."""
        self._synchronize()
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        tokens = self._count_tokens()
        self._connection.send(Turn(cpu, wall, tokens - self._tokens, self._memory.peak_mib()))
        self._tokens = tokens
        self._turns_left -= 1
        if self._turns_left:
            self._wait()

    def _wait(self) -> None:
        self._connection.recv()
        self._cpu, self._wall = time.process_time(), time.perf_counter()


class MeterCallback(TrainerCallback):
    """A turn goes from the end of an optimizer step to the end of the next, or of the one after some more.

    So all that a step needs counts, whether a library does it before or after HuggingFace's begin of the step.
    """

    def __init__(self, meter: TurnMeter, *, steps_per_turn: int) -> None:
        self._meter = meter
        self._steps_per_turn = steps_per_turn

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._meter.begin()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % self._steps_per_turn == 0:
            self._meter.end_turn()


class HostMemory:
    """Resident memory of this process."""

    def reset(self) -> None:
        """What is held now does not count."""
        # What building the trainer freed must not be there for the steps to use again.
        ctypes.CDLL(None).malloc_trim(0)
        self.forget_peak()
        self._held, self._files = _status("VmRSS"), _status("RssFile")

    def forget_peak(self) -> None:
        """The peak is from here on."""
        Path("/proc/self/clear_refs").write_text("5")

    def grown_mib(self) -> float:
        """What is held now."""
        return self._above(_status("VmRSS"))

    def peak_mib(self) -> float:
        """The most that was held at once."""
        return self._above(_status("VmHWM"))

    def _above(self, resident: int) -> float:
        # Pages of libraries that a step is the first to touch are no memory that it asked for.
        return (resident - self._held - (_status("RssFile") - self._files)) / 1024


class _CudaMemory:
    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()

    def peak_mib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._held) / 2**20


def _status(name: str) -> int:
    """KiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0])
