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
    from prefrl.trainer.base.steps import MicroStep
    from prefrl.types import TokenBatch

__all__ = ["OverlapStep"]


@dataclass
class OverlapStep:
    """`Step` whose groups are trained on in the order in which they come.

    The count that sums are divided by is known when the last group has come. Gradients are linear in the loss, so they
    are divided then, and the update is that of a step that waited.

    Args:
        arriving: A minibatch for each group; waits for them.
        policy: Gives the model that is trained, without what a backend puts around it.
        idle: One token without a loss.
        accelerator: HuggingFace's.
    """

    arriving: Iterator[Minibatch]
    policy: Callable[[], nn.Module]
    idle: TokenBatch
    accelerator: Any
    micro_batches: list[TokenBatch] = field(default_factory=list)

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Forward and backward of each group when its completions are there; `num_items` is not known yet."""
        device = self.accelerator.device
        total, own_items = torch.zeros((), device=device), 0.0
        for minibatch in self.arriving:
            own_items += minibatch.num_items
            # A rank has as many groups as the others, but not as many micro-batches of each.
            num_missing = distributed.missing_passes(self.policy(), len(minibatch.micro_batches), device)
            for batch in [*minibatch.micro_batches, *[self.idle] * num_missing]:
                total += micro_step(model, batch, 1.0, is_last=False)
            self.micro_batches += minibatch.micro_batches
        (count,) = distributed.sum_over_ranks([own_items], device)
        divisor = max(count, 1.0)
        with distributed.divided_update(self.accelerator, model, divisor):
            # No rank knows which of its groups comes last, so a pass without a loss synchronizes the gradients.
            if distributed.world_size() > 1 or distributed.updates_in_backward(self.accelerator):
                micro_step(model, self.idle, 1.0, is_last=True)
        return total / divisor
