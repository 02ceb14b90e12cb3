"""How the micro-batches of one optimizer step run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.types import TokenBatch

__all__ = ["LongBatch", "MicroStep", "Step", "SyncStep"]


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
