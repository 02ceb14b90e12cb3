"""Losses of tokens that are given, not sampled, and the value loss of a critic, for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefrl.losses.per_token import check_same_shape
from prefrl.losses.policy.tokens import TokenLoss


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


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None) -> TokenLoss:
    """Clipped squared error: 0.5 * max((v - R)^2, (v' - R)^2) with v' = clip(v, v_old - c, v_old + c).

    Where the clipped value has the larger error, v has left the range towards R: there is no gradient, and v moves no
    further. Everywhere else, including where v left the range away from R, the gradient is v - R.

    Args:
        values: [N] v, in the unit of the rewards; gradient flows.
        old_values: [N] v_old, values before the first update from this generation batch, treated as constant.
        returns: [N] R, the critic's targets, treated as constant.
        cliprange_value: c > 0, in the unit of the rewards; None: the plain squared error, without clipping.

    Returns:
        loss [N], and the 0/1 indicator `val/clipfrac` of tokens without gradient; no indicator without clipping.

    Raises:
        ValueError: Shapes differ, or the range is not positive.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 9 (squared error); OpenAI Baselines 2017, ppo2/model.py (clip)
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    if cliprange_value is not None and not cliprange_value > 0:
        raise ValueError(f"cliprange_value={cliprange_value}: needs to be positive, or None for no clipping")
    old_values, returns = old_values.detach(), returns.detach()
    error = (values - returns).square()
    if cliprange_value is None:
        return TokenLoss(loss=0.5 * error, stats={})
    clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    clipped_error = (clipped - returns).square()
    # torch.maximum would halve the gradient where the two errors are equal, although only one of them has a gradient.
    is_clipped = clipped_error > error
    loss = 0.5 * torch.where(is_clipped, clipped_error, error)
    return TokenLoss(loss=loss, stats={"val/clipfrac": is_clipped.float()})
