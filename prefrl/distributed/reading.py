"""Read partitioned weights on rank 0, while the other ranks contribute their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from prefrl.distributed.processes import from_main, is_main
from prefrl.distributed.shards import is_sharded, unwrap, whole

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reader"]

# Sent in place of a parameter's number when rank 0 has finished reading.
_DONE = -1


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

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or for a partitioned tensor a whole copy, which the caller owns."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return whole(tensor)
        self._is_reading = True
        from_main(number)
        copy = whole(tensor)
        self._is_reading = False
        return copy

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
            while (number := from_main(_DONE)) != _DONE:
                whole(parameters[number])
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
            from_main(_DONE)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, in the same order on all ranks."""
    inner = unwrap(model)
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward-only pass some are whole, and rounded for mixed precision
    return list(inner.parameters())
