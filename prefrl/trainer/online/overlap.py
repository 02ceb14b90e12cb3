"""An optimizer step whose groups are trained on as their completions come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.metrics import merge
from prefrl.rollout.buffer import Minibatch
from prefrl.rollout.collect import Collected, Request
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.trainer.online.trainer import OnlineTrainer

__all__ = ["ArrivingStep", "train_on_arrival"]


class ArrivingStep(list[TokenBatch]):
    """The micro-batches of an optimizer step whose completions are still coming; those trained on are its items."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.num_items = 0.0  # of this rank, so far


def train_on_arrival(trainer: OnlineTrainer, model: nn.Module, step: ArrivingStep) -> Tensor:
    """Forward and backward of each group when its completions are there.

    The count that sums are divided by is known when the last has come. Gradients are linear in the loss, so they are
    divided then, and the update is that of a step that waited.

    Returns:
        The loss of the step, on this rank.
    """
    device = trainer.args.device
    total = torch.zeros((), device=device)
    for minibatch in _arriving_minibatches(trainer, step):
        step.num_items += minibatch.num_items
        merge(trainer.metrics["train"], minibatch.metrics)
        # A rank has as many groups as the others, but not as many micro-batches of each.
        num_missing = distributed.missing_passes(trainer.policy, len(minibatch.micro_batches), device)
        for batch in [*minibatch.micro_batches, *[trainer.idle_batch()] * num_missing]:
            total += trainer.micro_step(model, batch, 1.0, is_last=False)
        step += minibatch.micro_batches
    count, num_tokens = distributed.sum_over_ranks([step.num_items, trainer.tokens_seen(step)], device)
    trainer.state.num_input_tokens_seen += int(num_tokens)
    divisor = max(count, 1.0)
    with distributed.divided_update(trainer.accelerator, model, divisor):
        # No rank knows which of its groups comes last: gradients are synchronized in a pass that has none of its own.
        if distributed.world_size() > 1 or distributed.updates_in_backward(trainer.accelerator):
            trainer.micro_step(model, trainer.idle_batch(), 1.0, is_last=True)
    trainer.account.switch("optimizer")
    return total / divisor


def _arriving_minibatches(trainer: OnlineTrainer, step: ArrivingStep) -> Iterator[Minibatch]:
    """One for each group, in the order in which they come."""
    arriving = trainer.collector.by_group(step.request)
    parts = []
    while True:
        with trainer.account.phase("generation"):
            collected = next(arriving, None)
            if collected is None:
                break
            trainer.account.move("reward", collected.reward_s)
        parts.append(collected)
        (minibatch,) = trainer.minibatches(collected.rollouts, num_parts=1, over_ranks=False)
        yield minibatch
    trainer.report(Collected.concat(parts))
