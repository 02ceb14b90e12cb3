"""A process measures itself, and waits for its turn."""

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
    """Starts a turn when the parent process allows it, and reports it when it is done."""

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
        """Call this when everything is built: memory that is held now is not counted."""
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
    """A turn lasts from the end of an optimizer step to the end of the next one, or of a later one.

    So all the work of a step is counted, whether a library does it before or after HuggingFace's event for its start.
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
    """Measures the resident memory of this process."""

    def reset(self) -> None:
        """Do not count the memory that is held now."""
        # Memory that was freed while the trainer was built must not be available to the steps.
        ctypes.CDLL(None).malloc_trim(0)
        self.forget_peak()
        self._held, self._files = _status("VmRSS"), _status("RssFile")

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        Path("/proc/self/clear_refs").write_text("5")

    def grown_mib(self) -> float:
        """The memory that is held now."""
        return self._above(_status("VmRSS"))

    def peak_mib(self) -> float:
        """The most memory that was held at any time."""
        return self._above(_status("VmHWM"))

    def _above(self, resident: int) -> float:
        # Library pages that a step is the first to touch are not memory that it allocated.
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
