"""Policy-gradient losses for each token, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.losses.reduce import Reduction, row_sums, trainable_per_row
from prefrl.losses.shapes import check_same_shape
from prefrl.losses.table import keyword_names

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["POLICY_LOSSES", "PolicyLoss", "TokenLoss", "clipped_surrogate", "sequence_log_ratio"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token, and what is logged about it."""

    loss: Tensor  # [N], gradient flows
    stats: dict[str, Tensor]  # [N] float each, constants; averaged over trainable tokens by the caller


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, delta: float | None
) -> TokenLoss:
    """PPO's surrogate with separate bounds: -min(r' A, clip(r, 1 - clip_low, 1 + clip_high) A), r' = min(r, delta).

    The clip limits only the side that the advantage favours; `delta` limits large ratios where A < 0, for which the
    plain surrogate has no bound.

    Args:
        log_ratio: [N] nats, log pi - log old; gradient flows.
        advantages: [N], treated as constant.
        clip_low: The ratio is clipped to >= 1 - clip_low; in 0 .. 1.
        clip_high: The ratio is clipped to <= 1 + clip_high.
        delta: Largest ratio where A < 0, above 1 + clip_high; None: no bound.

    Returns:
        loss [N], and 0/1 indicators of ratios outside the clip range on the side that it limits:
        `clip_ratio/low` (r < 1 - clip_low and A < 0), `clip_ratio/high` (r > 1 + clip_high and A > 0) and
        `clip_ratio/region` (either).

    Raises:
        ValueError: Shapes differ, or bounds that exclude each other.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10 (separate
        bounds); Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291 (delta)
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: need 0 <= clip_low <= 1 and clip_high >= 0")
    if delta is not None and delta <= 1 + clip_high:
        raise ValueError(f"delta={delta}: needs to be above 1 + clip_high = {1 + clip_high}")
    advantages = advantages.detach()
    is_negative = advantages < 0
    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    highest = math.log1p(clip_high)
    # Where A < 0 the minimum is max(r', 1 - clip_low) * A, else min(r, 1 + clip_high) * A. The bounds are put on the
    # logarithm because the gradient of a ratio that overflows is infinity times zero, NaN, even where it is clipped.
    lower = torch.full_like(log_ratio, -math.inf).masked_fill(is_negative, lowest)
    upper = torch.full_like(log_ratio, highest).masked_fill(is_negative, math.log(delta) if delta else math.inf)
    loss = -log_ratio.clamp(lower, upper).exp() * advantages
    is_low = (log_ratio < lowest) & is_negative
    is_high = (log_ratio > highest) & (advantages > 0)
    stats = {"clip_ratio/low": is_low, "clip_ratio/high": is_high, "clip_ratio/region": is_low | is_high}
    return TokenLoss(loss=loss, stats={name: indicator.float() for name, indicator in stats.items()})


def sequence_log_ratio(log_ratio: Tensor, trainable: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """The mean log-ratio of a row's trainable tokens, on each of its tokens: log of GSPO's sequence ratio.

    Its gradient reaches every trainable token of the row, from every token that the result stands on.

    Args:
        log_ratio: [N] nats, gradient flows; read at trainable tokens alone.
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.

    Returns:
        [N] nats; 0 in rows without a trainable token.

    Raises:
        ValueError: Shapes differ.

    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 7
    """
    check_same_shape(log_ratio=log_ratio, trainable=trainable, row_index=row_index)
    sums = row_sums(log_ratio, trainable, row_index, num_rows)
    counts = trainable_per_row(trainable, row_index, num_rows).clamp(min=1)
    return (sums / counts.to(sums.dtype))[row_index]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A row of `POLICY_LOSSES`: `function(log_ratio, advantages, **hyperparameters)`, then `reduction`."""

    function: Callable[..., TokenLoss]
    reduction: Reduction
    source: str

    @property
    def hyperparameters(self) -> frozenset[str]:
        """Names of the keyword arguments that the function needs."""
        return keyword_names(self.function)


# Counts span the whole optimizer step on all ranks. So bnpo, a token mean over one micro-batch in TRL, is the same as
# dapo here; configurations carry both names.
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped_surrogate, "sequence_mean", "Shao et al. 2024, arXiv 2402.03300, eq. 3"),
    "bnpo": PolicyLoss(clipped_surrogate, "token", "TRL, GRPOConfig.loss_type"),
    "dr_grpo": PolicyLoss(clipped_surrogate, "constant", "Liu et al. 2025, arXiv 2503.20783, section 3.2"),
    "dapo": PolicyLoss(clipped_surrogate, "token", "Yu et al. 2025, arXiv 2503.14476, eq. 12"),
}
