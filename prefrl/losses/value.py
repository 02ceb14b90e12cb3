"""The loss of a critic for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prefrl.losses.checks import check_same_shape
from prefrl.losses.policy.tokens import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["value_loss"]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None) -> TokenLoss:
    """Squared error with a bound on how far it moves a value: 0.5 * max((v - R)^2, (v' - R)^2).

    v' = clip(v, v_old - c, v_old + c). Where the clipped value has the larger error, v has left the range on the side
    of R: there is no gradient, and v goes no further. Elsewhere, also where v left the range away from R, the gradient
    is v - R.

    Args:
        values: [N] v, in the unit of the rewards; gradient flows.
        old_values: [N] v_old, of the critic before this generation's first update, treated as constant.
        returns: [N] R, what the critic learns, treated as constant.
        cliprange_value: c > 0, in the unit of the rewards; None: the plain squared error, and nothing is clipped.

    Returns:
        loss [N], and the 0/1 indicator `val/clipfrac` of tokens without gradient; no indicator without a range.

    Raises:
        ValueError: Shapes differ, or the range is not positive.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 9 (squared error); OpenAI Baselines 2017, ppo2/model.py (clip)
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    if cliprange_value is not None and not cliprange_value > 0:
        raise ValueError(f"cliprange_value={cliprange_value}: needs to be positive, or None for no clip")
    old_values, returns = old_values.detach(), returns.detach()
    error = (values - returns).square()
    if cliprange_value is None:
        return TokenLoss(loss=0.5 * error, stats={})
    clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    clipped_error = (clipped - returns).square()
    # Not torch.maximum, which halves the gradient where the two are equal and only one of them has one.
    is_clipped = clipped_error > error
    loss = 0.5 * torch.where(is_clipped, clipped_error, error)
    return TokenLoss(loss=loss, stats={"val/clipfrac": is_clipped.float()})
