"""Reward model losses, from the scores of the two responses of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bradley_terry", "centering"]


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
    """Negative log-likelihood of the preference: -log sigmoid(chosen - rejected - margin).

    Args:
        chosen: [P] scores of the preferred responses of P pairs, gradient flows.
        rejected: [P] scores of the others, gradient flows.
        margin: [P], the lead of the chosen score at which the loss is ln 2, treated as constant; None: 0.

    Returns:
        [P] nats.

    Raises:
        ValueError: Shapes differ.

    Source: Touvron et al. 2023 (Llama 2), arXiv 2307.09288, eq. 1 and 2 (margin)
    """
    check_same_shape(chosen=chosen, rejected=rejected, margin=chosen if margin is None else margin)
    lead = chosen - rejected
    return -logsigmoid(lead if margin is None else lead - margin.detach())


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Squared sum of the two scores. It centers the scores at 0, since `bradley_terry` ignores a constant offset.

    Args:
        chosen: [P] scores of the preferred responses of P pairs, gradient flows.
        rejected: [P] scores of the others, gradient flows.

    Returns:
        [P], to be multiplied by a small coefficient.

    Raises:
        ValueError: Shapes differ.

    Source: Eisenstein et al. 2023, arXiv 2312.09244, eq. 2
    """
    check_same_shape(chosen=chosen, rejected=rejected)
    return (chosen + rejected).square()
