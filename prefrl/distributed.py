"""The one file that knows how processes work together: one process, or DDP over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "average_gradients",
    "full_params",
    "gather_objects",
    "gather_rows",
    "is_main",
    "max_over_ranks",
    "no_sync",
    "rank",
    "sum_over_ranks",
    "unwrap",
    "wait_for_all",
    "world_size",
]

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, 0 if it is alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """Whether this process writes logs and files."""
    return rank() == 0


def gather_objects(value: T) -> list[T]:
    """[world_size] every rank's host value, in rank order, on every rank. All ranks must call it."""
    if world_size() == 1:
        return [value]
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]  # all_gather_object fills every entry


def wait_for_all() -> None:
    """Return once every rank has called it."""
    gather_objects(None)


def gather_rows(rows: list[T], *, over_ranks: bool = True) -> tuple[list[T], int]:
    """Host rows of all ranks, in rank order, and where this rank's begin. All ranks must call it.

    Args:
        rows: This rank's.
        over_ranks: False: there are no others, and no other rank calls.
    """
    parts = gather_objects(rows) if over_ranks else [rows]
    start = sum(len(part) for part in parts[: rank()]) if over_ranks else 0
    return [row for part in parts for row in part], start


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums of host numbers over all ranks, in float64. All ranks must call it."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace gradients by their means over all ranks, as data-parallel back-ends do with those of a wrapped model.

    A parameter without a gradient on this rank counts as one with a gradient of zeros if another rank has one. All
    ranks must call it, with the same parameters.
    """
    if world_size() == 1:
        return
    trained = list(parameters)
    has_any = any(parameter.grad is not None for parameter in trained)
    if not trained or not max_over_ranks([float(has_any)], trained[0].device)[0]:
        return
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size()


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The largest of each host number over all ranks. All ranks must call it."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def _reduce(values: list[float], device: torch.device, operation: dist.ReduceOp.RedOpType) -> list[float]:
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return tensor.tolist()


def unwrap(model: nn.Module) -> nn.Module:
    """The model that the user gave, without what a back-end put around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside add to gradients locally; the next one outside synchronises them."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def full_params(model: nn.Module) -> Iterator[nn.Module]:
    """The model with all its parameters whole on this rank, for generation, copies and export."""
    yield unwrap(model)
