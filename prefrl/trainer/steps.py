"""What an optimizer step is made of: its micro-batches and how they run, and the plan that counts steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.types import TokenBatch

__all__ = [
    "LongBatch",
    "MicroStep",
    "Step",
    "StepPlan",
    "SyncStep",
]


class MicroStep(Protocol):
    """Forward and backward pass of one micro-batch."""

    def __call__(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """The micro-batch's share of the loss. The last micro-batch of a step synchronizes gradients over ranks."""
        ...


class Step(Protocol):
    """The item that HuggingFace's loop passes to `training_step`."""

    micro_batches: list[TokenBatch]  # those that are known so far, or have run
    num_items: float  # what their sums are divided by, known when they have run

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run all micro-batches and return the loss of the step on this rank."""
        ...


@dataclass
class SyncStep:
    """A `Step` whose micro-batches are all known when it begins; with none, it is an empty item."""

    micro_batches: list[TokenBatch] = field(default_factory=list)
    num_items: float = 1.0

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run the micro-batches one after another."""
        self.num_items = max(float(num_items or 0.0), 1.0)
        total = torch.zeros(())
        for i, batch in enumerate(self.micro_batches):
            total = total + micro_step(model, batch, num_items, is_last=i + 1 == len(self.micro_batches))
        return total


@dataclass(frozen=True)
class LongBatch:
    """A micro-batch of rows that are as long as any.

    Args:
        batch: Ready for its loss.
        tokens: What `max_tokens_per_micro_batch` counts for these rows.
    """

    batch: TokenBatch
    tokens: int


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
