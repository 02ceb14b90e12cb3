"""A running mean over all optimizer steps of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from prefrl import distributed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RunningMean"]


class RunningMean:
    """The mean of all values of earlier optimizer steps, over all ranks; 0 before the first step.

    The values of a step are included from the next step on, so that a loss that reads the mean does not depend on how
    its step is cut into micro-batches. The mean stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
        self._sums = torch.zeros(2, dtype=dtype, device=device)  # of values, and their number
        self._pending: list[Tensor] = []

    @property
    def value(self) -> Tensor:
        """[] the mean."""
        total, count = self._sums.unbind()
        return total / count.clamp(min=1.0)

    def add(self, values: Tensor) -> None:
        """Record values of this rank; the next `fold` includes them in the mean."""
        self._pending.append(torch.stack([values.detach().sum(), values.new_full((), values.numel())]))

    def fold(self) -> None:
        """Include the recorded values of all ranks in the mean. All ranks must call it."""
        own = torch.stack(self._pending).to(self._sums).sum(0) if self._pending else torch.zeros_like(self._sums)
        self._pending = []
        sums = distributed.summed_over_ranks(own)
        self._sums = self._sums + torch.where(sums[0].isfinite(), sums, 0.0)  # otherwise, the step was not applied

    def forget(self) -> None:
        """Drop the values that were recorded since the last `fold`."""
        self._pending = []

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the state, including recorded values. All ranks must call it; they all have the same state."""
        self.fold()
        if writes:
            total, count = self._sums.tolist()
            path.write_text(json.dumps({"total": total, "count": count}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads(path.read_text(encoding="utf-8"))
        self._sums = self._sums.new_tensor([state["total"], state["count"]])
        self._pending = []
