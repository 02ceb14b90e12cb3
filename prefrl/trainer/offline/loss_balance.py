"""Weights of several losses that adapt during training, by the methods that balance rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from prefrl import distributed
from prefrl.losses.advantage.balance import RewardBalancer
from prefrl.options.params import Params

Batch = TypeVar("Batch")


class LossBalance(Generic[Batch]):
    """The weights of K losses for each step; see `losses.advantage.balance`, where minus a loss is the reward.

    L_k is the distance of a loss's mean over the pairs of the step from the lowest loss of a pair so far, as a share
    of the range so far. g_k is the gradient of the summed loss with respect to the log-probs of tokens. The weights
    redistribute the total gradient length of the given weights.

    Args:
        method: A name in `REWARD_BALANCES`.
        params: The hyperparameters of the method.
        losses: The names of the losses with their weights, the preferences, which are not negative.
        losses_of: Maps a micro-batch and [N] log-probs of the policy to the K losses, [P] of its pairs each.
    """

    def __init__(
        self,
        method: str,
        params: Params,
        losses: Sequence[tuple[str, float]],
        losses_of: Callable[[Batch, Tensor], list[Tensor]],
    ) -> None:
        self.weighted = list(losses)  # with the weights of the current step, the same on all ranks
        self._losses_of = losses_of
        self._balancer = RewardBalancer(method, params, reward_weights=[weight for _, weight in losses])
        self._names = [name for name, _ in losses]

    def weigh(self, batches: Sequence[Batch], logprobs: Sequence[Tensor]) -> None:
        """Set the weights for a step. All ranks must call it.

        Args:
            batches: The micro-batches of this rank.
            logprobs: [N] nats for each of them, of the policy before the step.
        """
        size = len(self._names)
        gram = torch.zeros(size, size, dtype=torch.float64)
        values = torch.zeros(0, size, dtype=torch.float64)
        for batch, own in zip(batches, logprobs, strict=True):
            with torch.enable_grad():
                leaf = own.detach().requires_grad_()
                losses = self._losses_of(batch, leaf)
                gradients = [torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0] for loss in losses]
            each = torch.stack(gradients).to("cpu").double()
            gram = gram + each @ each.T
            values = torch.cat([values, torch.stack(losses, 1).detach().to("cpu").double()])
        found = distributed.gather_objects((gram, values))
        grams, rows = torch.stack([matrix for matrix, _ in found]), torch.cat([part for _, part in found])
        weights = self._balancer.weights(grams.sum(0), -rows)
        self.weighted = list(zip(self._names, weights.tolist(), strict=True))

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the state, which all ranks share."""
        if writes:
            path.write_text(json.dumps(self._balancer.state_dict()), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        self._balancer.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
