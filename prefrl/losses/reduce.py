"""Reduce token losses to one number: token weights, and the item count that their sum is divided by.

    total = (token_weights * token_loss).sum()
    loss  = (sum of totals) / (sum of item_counts), both over all micro-batches and ranks of an optimizer step

so that the loss does not depend on how a step is split.

| reduction | loss |
|---|---|
| token | mean over all trainable tokens of the step |
| sequence_mean | mean over rows of the mean over their trainable tokens |
| sequence_sum | mean over rows of the sum over their trainable tokens |
| constant | sum over trainable tokens / (rows * constant), Dr. GRPO |

A row without a trainable token counts as a row whose loss is 0, as in TRL.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prefrl.options.policy import Reduction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_same_shape", "item_count", "row_items", "row_sums", "token_weights", "trainable_per_row"]


def check_same_shape(**tensors: Tensor) -> None:
    """Reject tensors of different shapes, which might broadcast silently.

    Raises:
        ValueError: Shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {named}; all of them need to be equal")


def trainable_per_row(trainable: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """[B] float32: trainable tokens of each row.

    Args:
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.
    """
    check_same_shape(trainable=trainable, row_index=row_index)
    counts = torch.zeros(num_rows, dtype=torch.float32, device=trainable.device)
    return counts.index_add_(0, row_index, trainable.float())


def row_sums(values: Tensor, trainable: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """Sum of a per-token quantity over the trainable tokens of each row.

    Args:
        values: [N], gradient flows; read at trainable tokens only.
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.

    Returns:
        [B], in the unit of `values`; 0 in rows without a trainable token.
    """
    check_same_shape(values=values, trainable=trainable, row_index=row_index)
    return values.new_zeros(num_rows).index_add(0, row_index, values.where(trainable, 0.0))


def token_weights(
    trainable: Tensor,
    row_index: Tensor,
    num_rows: int,
    *,
    reduction: Reduction,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token's loss in the sum; 0 where a token is not trainable.

    Args:
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.
        reduction: See the table of this module.
        dtype: Dtype of the weights.

    Returns:
        [N]: 1 / (trainable tokens of the row) for `sequence_mean`, else 1.
    """
    check_same_shape(trainable=trainable, row_index=row_index)
    if reduction != "sequence_mean":
        return trainable.to(dtype)
    return trainable / trainable_per_row(trainable, row_index, num_rows).to(dtype).clamp(min=1)[row_index]


def item_count(
    trainable: Tensor, row_index: Tensor, num_rows: int, *, reduction: Reduction, constant: float | None
) -> Tensor:
    """Number of items that the weighted sum of these rows is divided by, added over micro-batches and ranks.

    Returns:
        Scalar float32, the sum of `row_items`, which see.
    """
    return row_items(trainable, row_index, num_rows, reduction=reduction, constant=constant).sum()


def row_items(
    trainable: Tensor, row_index: Tensor, num_rows: int, *, reduction: Reduction, constant: float | None
) -> Tensor:
    """What each row counts among the items that the weighted sum of a step is divided by.

    Args:
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.
        reduction: See the table of this module.
        constant: For reduction `constant` only: how many tokens each row counts as. Dr. GRPO uses the maximum
            completion length.

    Returns:
        [B] float32.

    Raises:
        ValueError: Shapes differ, or `constant` is missing, not positive, or given where it has no effect.

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2 (constant)
    """
    check_same_shape(trainable=trainable, row_index=row_index)
    if reduction != "constant" and constant is not None:
        raise ValueError(f"constant={constant} has no effect with reduction={reduction!r}: pass None")
    if reduction == "token":
        return trainable_per_row(trainable, row_index, num_rows)
    tokens_per_row = 1.0
    if reduction == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"constant={constant}: reduction='constant' needs a positive number of tokens")
        tokens_per_row = constant
    return torch.full((num_rows,), tokens_per_row, dtype=torch.float32, device=trainable.device)
