"""A running mean over all optimizer steps of a training run."""

from __future__ import annotations

import json
import math
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
    its step is cut into micro-batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = 0.0
        self._count = 0.0
        self._pending: list[Tensor] = []

    @property
    def value(self) -> float:
        """The mean."""
        return self._total / self._count if self._count else 0.0

    def add(self, values: Tensor) -> None:
        """Record values of this rank; the next `fold` includes them in the mean."""
        self._pending.append(torch.stack([values.detach().sum(), values.new_full((), values.numel())]))

    def fold(self) -> None:
        """Include the recorded values of all ranks in the mean. All ranks must call it."""
        # Summed on the host, in float64, which not every device has.
        rows = torch.stack(self._pending).tolist() if self._pending else [[0.0, 0.0]]
        total, count = (sum(column) for column in zip(*rows, strict=True))
        self._pending = []
        total, count = distributed.sum_over_ranks([total, count], self._device)
        if math.isfinite(total):  # otherwise, the step was not applied
            self._total += total
            self._count += count

    def forget(self) -> None:
        """Drop the values that were recorded since the last `fold`."""
        self._pending = []

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the state, including recorded values. All ranks must call it; they all have the same state."""
        self.fold()
        if writes:
            path.write_text(json.dumps({"total": self._total, "count": self._count}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads(path.read_text(encoding="utf-8"))
        self._total, self._count = state["total"], state["count"]
        self._pending = []
