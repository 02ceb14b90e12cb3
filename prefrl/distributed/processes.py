"""Processes, the ranks that they form, and the communication between them.

Each rank has its own rows. A rank is one process or, with sequence parallelism, a team of consecutive processes that
have the same rows and each compute a part of their tokens (Ulysses). Gathering or summing over ranks counts every row
once. Processes sample rows by themselves, see `without_teams`, and their team learns from the rows of all its members.

Source: Jacobs et al. 2023, arXiv 2309.14509.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

T = TypeVar("T")


@atexit.register
def _end_group() -> None:
    """Join gloo's thread before the interpreter ends.

    That thread may still hold the last tensor of a collective. If it drops it while the interpreter shuts down, it is
    ended, and the process aborts: "terminate called without an active exception".
    """
    if is_distributed() and "nccl" not in dist.get_backend():
        dist.destroy_process_group()


@dataclass(frozen=True, eq=False)
class _Teams:
    """The teams of a run, as one process sees them."""

    size: int
    own: dist.ProcessGroup | None  # this process's team; None: the process is alone in it
    peers: dist.ProcessGroup | None  # one process of each team, in rank order; None: all processes


_ALONE = _Teams(1, None, None)
_teams = _ALONE
_longest_wait: timedelta | None = None  # None: torch's default


def limit_waits(seconds: float) -> None:
    """End waits for other processes after this time: in the group of all processes, and in teams formed from now on.

    HuggingFace's trainer gives `ddp_timeout` to groups on GPUs only.
    """
    global _longest_wait
    _longest_wait = timedelta(seconds=seconds)
    if is_distributed() and "gloo" in dist.get_backend():
        dist.distributed_c10d._set_pg_timeout(_longest_wait)


def form_teams(size: int) -> None:
    """Group every `size` consecutive processes into a team from now on. All processes must call it.

    Args:
        size: Must divide the number of processes; 1: every process is its own rank.
    """
    global _teams
    if size == _teams.size:
        return
    if size == 1:
        _teams = _ALONE
        return
    teams = [list(range(first, first + size)) for first in range(0, num_processes(), size)]
    own, _ = dist.new_subgroups_by_enumeration(teams, timeout=_longest_wait)  # type: ignore[no-untyped-call]
    across = list(zip(*teams, strict=True))
    peers, _ = dist.new_subgroups_by_enumeration(across, timeout=_longest_wait)  # type: ignore[no-untyped-call]
    _teams = _Teams(size, own, peers)


@contextmanager
def without_teams() -> Iterator[None]:
    """Inside, every process is a rank of its own, as for what it samples. All processes must enter it."""
    global _teams
    teams, _teams = _teams, _ALONE
    try:
        yield
    finally:
        _teams = teams


def team_size() -> int:
    """Number of processes in a team."""
    return _teams.size


def team_group() -> dist.ProcessGroup | None:
    """The process group of this process's team."""
    return _teams.own


def place_in_team() -> int:
    """This process's number in its team."""
    return dist.get_rank() % _teams.size if dist.is_initialized() else 0


def is_distributed() -> bool:
    """Whether a process group exists."""
    return dist.is_initialized()


def num_processes() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 if there is only one."""
    return dist.get_rank() // _teams.size if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() // _teams.size if dist.is_initialized() else 1


def rank_in_names(rank: int, world_size: int) -> str:
    """The number of a rank in names of files, with as many digits as the last rank has: names sort by rank."""
    return f"{rank:0{len(str(world_size - 1))}d}"


def is_main() -> bool:
    """Whether this process writes logs and files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: T) -> list[T]:
    """[world_size] the host values of all ranks, in rank order, on every process. All ranks must call it."""
    if world_size() == 1:
        return [value]
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=_teams.peers)
    return gathered  # type: ignore[return-value]  # all_gather_object fills every entry


def gather_in_team(value: T) -> list[T]:
    """[team_size] the host values of the processes of this process's team, in order; its own one is not a copy.

    All of them must call it.
    """
    if team_size() == 1:
        return [value]
    gathered: list[Any] = [None] * team_size()
    dist.all_gather_object(gathered, value, group=_teams.own)
    gathered[place_in_team()] = value
    return gathered


def gather_on_main(value: T) -> list[T] | None:
    """[world_size] the host values of all ranks, in rank order, on the main process; None on the others.

    All ranks must call it. What only the main process reads is sent to it alone.
    """
    if world_size() == 1:
        return [value] if is_main() else None
    gathered: list[T | None] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, gathered, group=_teams.peers, group_dst=0)
    return cast("list[T]", gathered) if is_main() else None


def from_main(value: T) -> T:
    """The main process's host value, on every process. All processes must call it."""
    if num_processes() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_main(work: Callable[[], T]) -> T:
    """Run `work` on the main process only; every process gets its result or its error. All processes must call it."""
    result: T | None = None
    error: Exception | None = None
    if is_main():
        try:
            result = work()
        except Exception as caught:  # raised below, on all processes
            error = caught
    result, shared = from_main((result, None if error is None else _shareable(error)))
    if shared is not None:
        raise error or shared
    return cast("T", result)


def _shareable(error: Exception) -> Exception:
    """The error, or one with its words if other processes could not receive it: they would wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def wait_for_all() -> None:
    """Barrier: return once every process has called it."""
    if num_processes() > 1:
        dist.all_gather_object([None] * num_processes(), None)


def gather_rows(rows: list[T], *, over_ranks: bool = True) -> tuple[list[T], int]:
    """Host rows of all ranks, in rank order, and the index of this rank's first row. All ranks must call it.

    Args:
        rows: This rank's rows.
        over_ranks: False: use this rank's rows only; other ranks then need not call it.
    """
    parts = gather_objects(rows) if over_ranks else [rows]
    start = sum(len(part) for part in parts[: rank()]) if over_ranks else 0
    return [row for part in parts for row in part], start


def exchange(parts: list[T], device: torch.device) -> list[T]:
    """All-to-all: [world_size] the values that each rank has for this one, in rank order. All ranks must call it.

    Args:
        parts: [world_size] a host value for each rank. The one for this rank itself is returned as it is.
        device: Device for the communication.
    """
    if world_size() == 1:
        return parts
    own = rank()
    outgoing = [b"" if to == own else pickle.dumps(part) for to, part in enumerate(parts)]
    sizes = torch.tensor([len(data) for data in outgoing], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=_teams.peers)
    data = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy()).to(device)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, data, coming.tolist(), sizes.tolist(), group=_teams.peers)
    incoming = torch.split(received.cpu(), coming.tolist())
    return [
        parts[own] if source == own else pickle.loads(part.numpy().tobytes()) for source, part in enumerate(incoming)
    ]


def on_own_gpu(work: Callable[..., T]) -> Callable[..., T]:
    """What a thread of user code runs instead of `work`: the same, on the current GPU of the thread that calls this.

    A thread begins with the first GPU, to which code that says "cuda" would send its tensors on every process.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return work
    device = torch.cuda.current_device()

    def run(*arguments: Any) -> T:
        torch.cuda.set_device(device)
        return work(*arguments)

    return run


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums of host numbers over all ranks, in float64. All ranks must call it."""
    return values if world_size() == 1 else _reduce(values, device, dist.ReduceOp.SUM, _teams.peers)


def summed_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks of numbers on the device, where they stay. All ranks must call it."""
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM, group=_teams.peers)
    return total


def team_totals(values: list[float], device: torch.device) -> list[float]:
    """Sums of host numbers over the processes of this process's team, in float64. All of them must call it."""
    return values if team_size() == 1 else _reduce(values, device, dist.ReduceOp.SUM, _teams.own)


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element-wise maximum of host numbers over all processes. All must call it."""
    return values if num_processes() == 1 else _reduce(values, device, dist.ReduceOp.MAX, None)


def min_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element-wise minimum of host numbers over all processes. All must call it."""
    return values if num_processes() == 1 else _reduce(values, device, dist.ReduceOp.MIN, None)


def gather_numbers(values: torch.Tensor) -> torch.Tensor:
    """[num_processes, n] the numbers [n] that each process has on its device. All processes must call it."""
    if num_processes() == 1:
        return values[None]
    gathered = values.new_empty((num_processes(), *values.shape))
    dist.all_gather(list(gathered), values.contiguous())
    return gathered


def _reduce(
    values: list[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation, group=group)
    return tensor.tolist()


def exchange_in_team(tensor: torch.Tensor, *, split: int, join: int) -> torch.Tensor:
    """All-to-all in the team: split dimension `split` evenly over the processes, and join the parts along `join`.

    It converts some tokens of all heads to all tokens of some heads, and back. All processes of the team must call it.
    """
    output: torch.Tensor = _Exchange.apply(tensor, split, join)  # type: ignore[no-untyped-call]
    return output


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.split, ctx.join = split, join
        return _exchanged(tensor, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(grad, ctx.join, ctx.split), None, None


def _exchanged(tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
    parts = torch.stack(tensor.chunk(team_size(), dim=split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=team_group())
    return torch.cat(received.unbind(), dim=join)


def sum_over_team(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the processes of the team, with gradients. All of them must call it and compute the same from it."""
    output: torch.Tensor = _SumOverTeam.apply(tensor)  # type: ignore[no-untyped-call]
    return output


class _SumOverTeam(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=team_group())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        # Every process of the team computes the same loss from the sum, and backends average gradients over all
        # processes. The gradient is therefore the sum of team_size equal gradients.
        return grad * team_size()
