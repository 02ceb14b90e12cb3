"""Weights that rank 0 reads alone, while the other ranks have parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from prefrl.distributed.processes import from_main, is_main
from prefrl.distributed.shards import is_sharded, unwrap, whole

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reader"]

# In the place of a parameter's number: rank 0 reads no more.
_DONE = -1


class Reader:
    """Makes the parameters of a model whole, one at a time.

    In a task of `lead`, rank 0 decides which and when, and may break off after any of them: ranks agree on each alone.
    Elsewhere all ranks have to read the same parameters in the same order.

    Args:
        model: Its weights may be partitioned, now or later.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}  # of parameters by id, while rank 0 leads
        self._is_reading = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a whole copy of a partitioned one, which the caller owns."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return whole(tensor)
        self._is_reading = True
        from_main(number)
        copy = whole(tensor)
        self._is_reading = False
        return copy

    def lead(self, task: Callable[[], None]) -> None:
        """Run `task` on rank 0, while the other ranks take part in what it reads. All ranks must call it.

        What the task raises is raised on rank 0 alone. The other ranks hold one whole parameter at a time.

        Raises:
            RuntimeError: A parameter could not be made whole, whatever the task made of that. Ranks are out of step
                then, and the process has to end: its launcher ends the others.
        """
        if not is_sharded(self._model):
            if is_main():
                task()
            return
        parameters = _parameters(self._model)
        if not is_main():
            while (number := from_main(_DONE)) != _DONE:
                whole(parameters[number])
            return
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        try:
            task()
        finally:
            self._numbers = {}
            if self._is_reading:
                raise RuntimeError("a weight could not be gathered from all processes; they cannot go on together")
            from_main(_DONE)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, in an order that ranks share."""
    inner = unwrap(model)
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a pass without a backward pass, some are whole, and rounded for mixed precision
    return list(inner.parameters())
