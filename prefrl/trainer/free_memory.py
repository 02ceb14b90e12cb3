"""How much memory passes need, on the device or on the host, compared with what is free."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

__all__ = ["TrialMemory", "free_memory"]

_CGROUP = Path("/sys/fs/cgroup")
_PEAK_RESET = Path("/proc/self/clear_refs")
# What training holds besides activations, in units of the trained weights: gradients, and Adam's two moments.
_GRADIENTS, _MOMENTS = 1, 2


class TrialMemory:
    """Measures passes that have gradients, and knows what the optimizer will need that has not run yet.

    Args:
        device: Where the passes run.
        share: The most that training may need of the free memory.
        trained: Bytes of the trained weights on this process.
        has_buckets: Whether data parallelism copies gradients into buckets.
    """

    def __init__(self, device: torch.device, *, share: float, trained: int, has_buckets: bool) -> None:
        self._device = device
        self._trained = trained
        self._limit = max(share * free_memory(device) - (_MOMENTS + has_buckets) * trained, 1.0)
        self._start = _used(device)

    @property
    def load(self) -> float:
        """The share of what training may need that the passes so far have needed at most."""
        return max(_peak(self._device) - self._start, 0) / self._limit

    @property
    def load_of_gradients(self) -> float:
        """The share that gradients need."""
        return _GRADIENTS * self._trained / self._limit


def free_memory(device: torch.device) -> float:
    """Bytes that this process can still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    free = min([psutil.virtual_memory().available, *_left_in_container()])
    return float(free) / int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _left_in_container() -> list[int]:
    """Bytes up to the limit of the container, if it has one."""
    try:
        limit, current = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return [int(limit) - int(current)]
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return []


def _used(device: torch.device) -> int:
    """Bytes in use, from which a new peak is measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # Linux alone can forget what the process has needed before
        _PEAK_RESET.write_text("5", encoding="ascii")
    return int(psutil.Process().memory_info().rss)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource  # Windows has none
    except ImportError:
        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
