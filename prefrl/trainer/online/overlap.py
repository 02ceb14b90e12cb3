"""An optimizer step that trains on groups while the completions of others are still being sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from prefrl import distributed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.rollout.buffer import Minibatch
    from prefrl.trainer.steps import MicroStep
    from prefrl.types import IdleBatch, TokenBatch

__all__ = ["OverlapStep"]


@dataclass
class OverlapStep:
    """A `Step` that trains on groups in the order in which they arrive.

    The item count that the sums are divided by is known only when the last group has arrived. Gradients are linear in
    the loss, so they are divided at the end, and the update equals that of a step that waited for all groups.

    Args:
        arriving: Yields a minibatch for each group, and waits until it has arrived.
        policy: Returns the model that is trained, without the backend's wrapper.
        idle: One token without a loss.
        accelerator: HuggingFace's accelerator.
    """

    arriving: Iterator[Minibatch[Any]]
    policy: Callable[[], nn.Module]
    idle: IdleBatch
    accelerator: Any
    micro_batches: list[TokenBatch] = field(default_factory=list)
    num_items: float = 1.0

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run forward and backward passes of each group once its completions are there; `num_items` is ignored."""
        device = self.accelerator.device
        total, own_items = torch.zeros((), device=device), 0.0
        for minibatch in self.arriving:
            own_items += minibatch.num_items
            # All ranks have the same number of groups, but not the same number of micro-batches in each.
            num_missing = distributed.missing_passes(self.policy(), len(minibatch.micro_batches), device)
            for batch in [*minibatch.micro_batches, *[self.idle] * num_missing]:
                total += micro_step(model, batch, 1.0, is_last=False)
            self.micro_batches += minibatch.micro_batches
        (count,) = distributed.sum_over_ranks([own_items], device)
        self.num_items = max(count, 1.0)
        with distributed.divided_update(self.accelerator, model, self.num_items):
            # No rank knows which of its groups comes last, so a pass without a loss synchronizes the gradients.
            if distributed.world_size() > 1 or distributed.updates_in_backward(self.accelerator):
                micro_step(model, self.idle, 1.0, is_last=True)
        return total / self.num_items
