"""Partitioned weights that rank 0 reads, to send or to save them, while the other ranks contribute their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from prefrl.distributed.processes import from_main, is_main, num_processes
from prefrl.distributed.shards import is_sharded, part_of, unwrap, whole

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Differences:
    """The elements of a whole tensor, flattened, that differ from what was read before."""

    places: Tensor  # [n] int64, increasing
    values: Tensor  # [n] integers of the elements' width, because comparing floats would miss NaN and -0.0

    @classmethod
    def between(cls, old: Tensor, new: Tensor, *, start: int = 0) -> Differences:
        """Of two tensors with the same shape and dtype; `start` is added to the places."""
        before, after = (tensor.reshape(-1).view(_INTEGERS[tensor.element_size()]) for tensor in (old, new))
        places = (before != after).nonzero()[:, 0]
        return cls(places + start, after[places])


@dataclass(frozen=True, slots=True)
class _Order:
    """What all ranks do for rank 0: gather a parameter, or compare it if there is a dtype."""

    number: int
    dtype: torch.dtype | None = None
    is_first: bool = False


class Reader:
    """Gathers the parameters of a model, one at a time.

    In a task of `lead`, rank 0 decides which parameters to read and when, and may stop after any of them, because the
    ranks coordinate each read separately. Outside of it, all ranks must read the same parameters in the same order.

    Args:
        model: Its weights may be partitioned, now or later.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}  # of parameters by id, while rank 0 leads
        self._is_reading = False
        self._parts: dict[int, Tensor] = {}  # by number: what this rank has compared last, on the host

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or for a partitioned tensor a whole copy, which the caller owns."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return whole(tensor)
        self._is_reading = True
        from_main(_Order(number))
        copy = whole(tensor)
        self._is_reading = False
        return copy

    def compare(self, tensor: Tensor, dtype: torch.dtype, *, is_first: bool) -> Tensor | Differences:
        """What of a tensor differs from the last call with it, if ranks can compare their parts; else as `__call__`.

        Each rank keeps its part on the host, rounded to `dtype`, and sends what has changed.

        Args:
            tensor: Not detached: a detached ZeRO-3 parameter does not know how it is partitioned.
            dtype: What is compared.
            is_first: The whole tensor is needed; later calls compare with it.
        """
        number = self._numbers.get(id(tensor))
        if number is None:
            return whole(tensor)
        self._is_reading = True
        order = from_main(_Order(number, dtype, is_first))
        found = self._follow(tensor, order)
        self._is_reading = False
        return found

    def _follow(self, tensor: Tensor, order: _Order) -> Tensor | Differences:
        """What all ranks do."""
        share = None if order.dtype is None else part_of(tensor)
        if order.dtype is None or share is None:
            return whole(tensor)
        part, start = share
        new = part.to("cpu", order.dtype, copy=True)
        old = self._parts.get(order.number)
        self._parts[order.number] = new
        if order.is_first or old is None or old.dtype != new.dtype:  # the same on all ranks
            return whole(tensor)
        own = Differences.between(old, new, start=start)
        found: list[Differences] | None = [own] * num_processes() if is_main() else None
        dist.gather_object(own, found, dst=0)
        if found is None:
            return own
        found.sort(key=lambda of_rank: int(of_rank.places[0]) if len(of_rank.places) else 0)
        return Differences(torch.cat([one.places for one in found]), torch.cat([one.values for one in found]))

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task` on rank 0, while the other ranks take part in its reads. All ranks must call it.

        Errors of the task are raised on rank 0 only. The other ranks hold one whole parameter at a time.

        Raises:
            RuntimeError: A parameter could not be gathered, even if the task caught that error. The ranks are then out
                of step, and the process must end; its launcher ends the others.
        """
        if not is_sharded(self._model):
            if is_main():
                task()
            return
        parameters = _parameters(self._model)
        if not is_main():
            done: _Order | None = None
            while (order := from_main(done)) is not None:
                self._follow(parameters[order.number], order)
            return
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        try:
            task()
        finally:
            self._numbers = {}
            if self._is_reading:
                raise RuntimeError(
                    "a weight could not be gathered from all processes, so they cannot continue together"
                )
            from_main(None)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, in the same order on all ranks."""
    inner = unwrap(model)
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward-only pass some are whole, and rounded for mixed precision
    return list(inner.parameters())
