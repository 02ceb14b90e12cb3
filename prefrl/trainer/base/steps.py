"""How the micro-batches of one optimizer step run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.types import TokenBatch

__all__ = ["MicroStep", "Step", "SyncStep"]


class MicroStep(Protocol):
    """Forward and backward pass of one micro-batch."""

    def __call__(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """Its share of the loss; gradients are synchronized over ranks in the last of a step."""
        ...


class Step(Protocol):
    """What HuggingFace's loop hands to `training_step`."""

    micro_batches: list[TokenBatch]  # those that are known, or have run

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run all micro-batches: the loss of the step on this rank."""
        ...


@dataclass
class SyncStep:
    """`Step` whose micro-batches are all there when it begins; without any, it is none."""

    micro_batches: list[TokenBatch] = field(default_factory=list)

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """One after another."""
        total = torch.zeros(())
        for i, batch in enumerate(self.micro_batches):
            total = total + micro_step(model, batch, num_items, is_last=i + 1 == len(self.micro_batches))
        return total
