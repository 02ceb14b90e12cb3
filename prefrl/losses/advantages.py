"""Advantages that compare the completions of one prompt with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Advantages", "group_advantages"]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of B rows with what is logged about them."""

    values: Tensor  # [B] float32; 0 for rows without a reward
    group_std: Tensor  # [B] float32, of the totals of the row's group, n - 1; 0 if fewer than two have a total
    totals: Tensor  # [B] float32, weighted sum of raw rewards; NaN for rows without a reward


def group_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_index: Tensor,
    *,
    scale: Literal["group", "batch", "none"],
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"],
    epsilon: float,
) -> Advantages:
    """How much better a completion is than the others of its group.

    `sum_then_normalize`: with R_b = sum_k w_k r_bk,

        A_b = (R_b - mean_group) / (s + epsilon), s = std of the group ("group") or of the batch ("batch")
        A_b = R_b - mean_group ("none")

    `normalize_then_sum` (GDPO): each reward is normalised within its group, and the weighted sum within the batch,

        S_b = sum_k w_k (r_bk - mean_group_k) / (std_group_k + epsilon),  A_b = S_b / (std_batch(S) + epsilon)

    where S needs no centring: its mean is 0 by construction.

    Standard deviations have n - 1 below the line. A reward that is NaN takes part in no sum and no statistic; a row of
    NaN alone gets advantage 0. A row that is alone in its group is its own mean, so its advantage is 0. Equal rewards
    give exactly 0.

    Args:
        rewards: [B, K], NaN where a reward has no value for a row. Batch statistics are over these B rows, so pass
            those of all ranks.
        weights: [K].
        group_index: [B] int64, any numbers; equal for the completions of a prompt.
        scale: What centred rewards are divided by. `normalize_then_sum` divides by group, then batch, so it goes with
            "group" alone.
        aggregation: See above.
        epsilon: Added to standard deviations.

    Raises:
        ValueError: Shapes that do not fit, an infinite reward, or `scale` not "group" with `normalize_then_sum`.

    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783
        ("none"); Liu et al. 2026 (GDPO), arXiv 2601.05242 (normalize_then_sum)
    """
    _check(rewards, weights, group_index)
    rewards, weights = rewards.detach().double(), weights.double()
    groups = torch.unique(group_index, return_inverse=True)[1]
    batch = torch.zeros_like(groups)
    totals = _weighted_sum(rewards, weights)
    group_std = _std(totals, groups)
    if aggregation == "normalize_then_sum":
        if scale != "group":
            raise ValueError(f"scale={scale!r} has no effect with aggregation='normalize_then_sum': use scale='group'")
        per_reward = [_centred(r, groups) / (_std(r, groups) + epsilon) for r in rewards.unbind(1)]
        values = _weighted_sum(torch.stack(per_reward, 1), weights)
        values = values / (_std(values, batch) + epsilon)
    else:
        values = _centred(totals, groups)
        if scale != "none":
            values = values / ((group_std if scale == "group" else _std(totals, batch)) + epsilon)
    return Advantages(values=values.nan_to_num(nan=0.0).float(), group_std=group_std.float(), totals=totals.float())


def _check(rewards: Tensor, weights: Tensor, group_index: Tensor) -> None:
    if rewards.dim() != 2 or weights.shape != rewards.shape[1:] or group_index.shape != rewards.shape[:1]:
        shapes = f"rewards {tuple(rewards.shape)}, weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes}, group_index {tuple(group_index.shape)}: need to be [B, K], [K] and [B]")
    if torch.isinf(rewards).any():
        raise ValueError("rewards contain an infinite value: each needs to be finite, or NaN for none")


def _weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """[B] sum over the rewards that are not NaN; NaN if all are."""
    return (rewards * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def _centred(values: Tensor, groups: Tensor) -> Tensor:
    """[B] values minus the mean of their group, over values that are not NaN; NaN stays."""
    # Measured from the lowest of the group, so that rounding does not give equal values a difference.
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, groups, values.nan_to_num(nan=torch.inf), "amin")
    shifted = values - lowest[groups]
    return shifted - (_group_sum(shifted, groups) / _group_count(values, groups).clamp(min=1))[groups]


def _std(values: Tensor, groups: Tensor) -> Tensor:
    """[B] n-1 standard deviation of the values of each row's group that are not NaN; 0 if they are fewer than two."""
    squares = _group_sum(_centred(values, groups).square(), groups)
    return (squares / (_group_count(values, groups) - 1).clamp(min=1)).sqrt()[groups]


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, groups, values.nan_to_num(nan=0.0))


def _group_count(values: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, groups, (~values.isnan()).to(values.dtype))
