"""Rows that adapters and prefrl's own functions are compared on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.tensors import TokenRows, policy_loss, reduction_of, summed

# Rows of 3, 1 and 4 tokens that have a loss, one with a hole.
MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
LENGTH = 5  # the longest completion
LOSSES = tuple(name for name, row in POLICY_LOSSES.items() if row.selection is None)


def numbers(seed: int, *, around: float = -1.5) -> Tensor:
    return around + torch.randn(MASK.shape, generator=torch.manual_seed(seed), dtype=torch.float64) / 2


LOGPROBS, OLD, SAMPLING, REFERENCE = (numbers(seed) for seed in range(4))
ADVANTAGE, WEIGHTS = numbers(4, around=0.0), numbers(5, around=1.0).abs()


def level_of(name: str) -> Any:
    return POLICY_LOSSES[name].levels[0]  # type: ignore[index]


def expected(
    name: str, term: Tensor | float = 0.0, weights: Tensor | float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """The loss of prefrl and its gradient; options are level, old log-probs and hyperparameters."""
    leaf, rows = LOGPROBS.clone().requires_grad_(), TokenRows(MASK)
    given = {"level": level_of(name), **options}
    losses = policy_loss(name, rows, leaf, given.pop("old", OLD), ADVANTAGE, **given).loss * weights + term
    constant = LENGTH if reduction_of(name) == "constant" else None
    found = summed(rows, losses, reduction_of(name), constant=constant)
    loss = found.total / found.items
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def check(loss: Tensor, gradient: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(loss.detach(), wanted[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient, wanted[1], rtol=1e-6, atol=1e-8)
