"""How far a training is: the planned steps that are done, and the generation batch that its steps learn from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

__all__ = ["StepPlan"]


class StepPlan:
    """Counts the steps of a run as they are planned when it begins; here, each optimizer step is one of them.

    Args:
        unit: Planned steps that belong together: those that learn from one generation batch.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.total = self.per_epoch = 1
        self.position = 0  # planned steps that are done
        self.start = self.end = 0  # of the unit that is under way

    def start_at(self, step: int, *, total: int, per_epoch: int, checkpoint: Path | None) -> None:
        """Start at a step of a run: 0, or the one that a checkpoint was written after.

        Args:
            step: Optimizer steps that are done.
            total: Planned steps of the run.
            per_epoch: Planned steps of an epoch.
            checkpoint: Where training resumes from.
        """
        self.total, self.per_epoch, self.position = total, per_epoch, step
        self.end = -(-step // self.unit) * self.unit
        self.start = self.end - self.unit

    def next_items(self, items: Iterator[Any], num_each: int) -> list[Any]:
        """The data loader's items for the next step; [] at the end of an epoch.

        Args:
            items: Of the rest of the epoch.
            num_each: Items of a planned step.
        """
        found = list(islice(items, num_each))
        if found and self.position >= self.end:
            self.start, self.end = self.position, self.position + self.unit
        return found

    def end_step(self) -> None:
        """Count the step that is under way."""
        self.position += 1

    @property
    def units(self) -> range:
        """The numbers of the generation batches that the unit under way learns from."""
        return range(self.start // self.unit, self.end // self.unit)

    @property
    def units_left(self) -> range:
        """The numbers of the generation batches that later units need."""
        return range(self.end // self.unit, self.last_unit + 1)

    @property
    def last_unit(self) -> int:
        """The number of the last generation batch of the run."""
        return (self.total - 1) // self.unit

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end."""
        return self.total - self.position
