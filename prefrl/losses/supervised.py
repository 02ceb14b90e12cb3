"""Supervised losses: the tokens are given, not sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SUPERVISED_LOSSES", "dft", "nll"]


def nll(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each token: -log p.

    Args:
        logprobs: [N] nats, gradient flows.

    Returns:
        [N] nats.
    """
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Dynamic fine-tuning: -sg(p) * log p, so a token's gradient is that of -p.

    sg(p) is p as a constant. It cancels the factor 1/p that lets unlikely tokens dominate the gradient of `nll`.

    Args:
        logprobs: [N] nats, gradient flows.

    Returns:
        [N], at most 1/e.

    Source: Wu et al. 2025, arXiv 2508.05629, eq. 9
    """
    return -logprobs.detach().exp() * logprobs


SUPERVISED_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": nll, "dft": dft}
