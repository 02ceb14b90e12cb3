"""An optimizer step whose groups are trained on as their completions come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.rollout.buffer import Minibatch
from prefrl.rollout.collect import Collected, Request
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.trainer.online_trainer import OnlineTrainer

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

    Raises:
        ConfigError: The back-end keeps gradients where they cannot be divided.
    """
    device = trainer.args.device
    total = torch.zeros((), device=device)
    for minibatch in _arriving_minibatches(trainer, step):
        step.num_items += minibatch.num_items
        for batch in minibatch.micro_batches:
            total += trainer.micro_step(model, batch, 1.0, is_last=False)
            step.append(batch)
    if distributed.world_size() > 1:
        # A rank does not know which of its groups comes last: all synchronise gradients in a pass without any.
        trainer.micro_step(model, trainer.idle_batch(), 1.0, is_last=True)
    trainer.account.switch("optimizer")
    seen = sum(trainer.tokens_seen(batch) for batch in step)
    count, num_tokens = distributed.sum_over_ranks([step.num_items, seen], device)
    trainer.state.num_input_tokens_seen += int(num_tokens)
    gradients = [parameter.grad for parameter in trainer.trained_parameters() if parameter.grad is not None]
    if step and not gradients:
        raise ConfigError(
            "generation_mode='overlap': the back-end keeps gradients where they cannot be divided. Use 'sync' or "
            "'async' with it."
        )
    for gradient in gradients:
        gradient.div_(max(count, 1.0))
    return total / max(count, 1.0)


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
