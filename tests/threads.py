"""Threads as the ranks of a run, in one process, which must all call the same collectives in the same order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.patience import PATIENCE

__all__ = ["on_ranks"]

T = TypeVar("T")
_COLLECTIVES = {"all_gather_single", "all_to_all_single", "allgather", "allreduce", "broadcast", "gather", "scatter"}
_COLLECTIVES |= {"_allgather_base", "alltoall_base"}  # the names of the first two in older versions of torch


def on_ranks(number: int, work: Callable[[int], T]) -> list[T | Exception]:
    """What `work(rank)` returns or raises on each of several ranks.

    Raises:
        AssertionError: A rank waits for others that have ended, or ranks have called different collectives.
    """
    calls: list[list[str]] = [[] for _ in range(number)]
    results: list[Any] = [None] * number
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=number, store=store)
        try:
            results[rank] = work(rank)
        except (Exception, SystemExit) as error:  # for the caller to judge; the latter where it was woken
            results[rank] = error
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(number)]
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # each thread has groups of its own
    isolate(True)
    threaded._install_threaded_pg()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in sorted(_COLLECTIVES & vars(threaded.ProcessLocalGroup).keys()):
                patch.setattr(threaded.ProcessLocalGroup, name, _noted(name, calls))
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + PATIENCE
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
            waiting = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
            threaded.ProcessLocalGroup.exception_handle(None)  # wakes those that wait
            for thread in threads:
                thread.join(PATIENCE)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    assert not waiting, f"ranks {waiting} wait for others; collectives: {calls}; results: {results}"
    assert all(of_rank == calls[0] for of_rank in calls), calls
    return results


def _noted(name: str, calls: list[list[str]]) -> Callable[..., Any]:
    original = getattr(threaded.ProcessLocalGroup, name)

    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        calls[group.rank()].append(name)
        return original(group, *args, **kwargs)

    return collective
