"""Averages of the weights that a model has at different times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from prefrl import distributed

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["AveragedWeights"]


class AveragedWeights:
    """An average of a model's trained weights, in float32, partitioned as they are. ZeRO-3 is not supported.

    With an adapter, its matrices are averaged themselves, not the products of two of them. Of DDP and ZeRO-2, each
    process keeps all of it, of FSDP2 its part.

    Args:
        model: Without a backend's wrappers. The average begins with its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = {name: p.detach().to(torch.float32, copy=True) for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        distributed.release(self._model)
        return ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def mix(self, alpha: float) -> None:
        """Set average = alpha * weights of the model + (1 - alpha) * average."""
        with torch.no_grad():
            for name, parameter in self._trained():
                distributed.mix(self._weights[name], parameter, alpha)

    def put(self) -> None:
        """Copy the average into the model, in the model's dtype."""
        for name, parameter in self._trained():
            distributed.assign(parameter, self._weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averaged weights."""
        before = {name: p.detach().clone() for name, p in self._trained()}
        self.put()
        try:
            yield
        finally:
            for name, parameter in self._trained():
                distributed.assign(parameter, before[name])

    def state(self, *, keep: bool) -> dict[str, Tensor]:
        """Whole copies on the host. All processes must call it; those without `keep` get {}."""
        return distributed.whole_on_host(self._weights, keep=keep)

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Read what `state` returned, one tensor at a time. All processes must call it with the same tensors."""
        for name, weight in self._weights.items():
            distributed.load_whole(weight, read(name))
