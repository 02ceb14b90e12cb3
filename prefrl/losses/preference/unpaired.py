"""Unpaired preference losses, for single responses labeled desirable or undesirable.

A log-ratio is that of a whole response: log pi(y | x) - log ref(y | x), summed over its tokens. The caller applies the
weights of desirable and undesirable rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bco", "density_ratio_weights", "kto"]


def kto(log_ratio: Tensor, is_desirable: Tensor, *, beta: float, kl: Tensor) -> Tensor:
    """Kahneman-Tversky loss: 1 - sigmoid(b (u - z)) for desirable rows, 1 - sigmoid(b (z - u)) for undesirable ones.

    u is the log-ratio and z = max(kl, 0) the reference point: a log-ratio above it counts as a gain. The maximum is
    there because an estimate of the divergence may be negative, but the divergence itself is not. With kl = 0, the
    log-ratio at the start of training, this is APO-zero for one side of a pair.

    Args:
        log_ratio: [B] nats, gradient flows.
        is_desirable: [B] bool.
        beta: b > 0, in 1 / nats.
        kl: Scalar, nats, estimate of KL(pi || ref) over the whole step, treated as constant.

    Returns:
        [B], in 0 .. 1.

    Raises:
        ValueError: Shapes differ, or `kl` is not a scalar.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1; D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7
    """
    check_same_shape(log_ratio=log_ratio, is_desirable=is_desirable)
    if kl.ndim:
        raise ValueError(f"kl has shape {tuple(kl.shape)}: needs to be one number for all rows of a step")
    reference_point = kl.detach().clamp(min=0)
    return torch.sigmoid(_side(is_desirable) * (beta * (reference_point - log_ratio)))


def bco(log_ratio: Tensor, is_desirable: Tensor, *, beta: float, reward_shift: float | Tensor) -> Tensor:
    """Cross-entropy of a classifier with logit b u - t: -log sigmoid(b u - t), if undesirable -log sigmoid(t - b u).

    Args:
        log_ratio: [B] nats, u, gradient flows.
        is_desirable: [B] bool.
        beta: b > 0, in 1 / nats.
        reward_shift: t, a number or [], running mean of the rewards b u of desirable and undesirable rows.

    Returns:
        [B] nats.

    Raises:
        ValueError: Shapes differ.

    Source: Jung et al. 2024, arXiv 2404.04656, section 4
    """
    check_same_shape(log_ratio=log_ratio, is_desirable=is_desirable)
    return -logsigmoid(_side(is_desirable) * (beta * log_ratio - reward_shift))


def density_ratio_weights(probability_desirable: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Weights p / (1 - p) of undesirable rows, to match the distribution of their prompts to the desirable rows'.

    Args:
        probability_desirable: [B], p(desirable | prompt) of a classifier, in 0 .. 1.
        lowest: Smallest weight, >= 0.
        highest: Largest weight, finite.

    Returns:
        [B], constant.

    Raises:
        ValueError: Not 0 <= lowest <= highest.

    Source: Jung et al. 2024, arXiv 2404.04656, section 4 (underlying distribution matching)
    """
    if not 0 <= lowest <= highest:
        raise ValueError(f"lowest={lowest}, highest={highest}: need 0 <= lowest <= highest")
    probability = probability_desirable.detach()
    return (probability / (1 - probability)).clamp(lowest, highest)


def _side(is_desirable: Tensor) -> Tensor:
    """[B]: 1 for desirable rows, -1 for undesirable ones."""
    return torch.where(is_desirable, 1.0, -1.0)
