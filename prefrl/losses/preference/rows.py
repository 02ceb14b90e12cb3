"""Log-probs and weights of the rows that preference losses compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.losses.checks import check_same_shape
from prefrl.losses.reduce import row_sums, trainable_per_row

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["length_desensitized", "wpo_weights"]


def length_desensitized(
    logprobs: Tensor, trainable: Tensor, row_index: Tensor, shared_lengths: Tensor, num_rows: int, *, ld_alpha: float
) -> Tensor:
    """Length-desensitized log-probs: tokens beyond the length of the pair's shorter response get a smaller weight.

        sum of the first `shared_length` log-probs + ld_alpha * sum of the others

    Args:
        logprobs: [N] nats, gradient flows; read at trainable tokens only.
        trainable: [N] bool, tokens that have a loss; only these count towards the length.
        row_index: [N] int64, row of each token, in 0 .. B-1, rows in order.
        shared_lengths: [B], number of trainable tokens of the shorter response in the row's pair.
        num_rows: B.
        ld_alpha: In 0 .. 1; 1 is the plain sum.

    Returns:
        [B] nats.

    Raises:
        ValueError: Shapes differ, or `ld_alpha` is out of bounds.

    Source: Liu et al. 2024 (LD-DPO), arXiv 2409.06411
    """
    check_same_shape(logprobs=logprobs, trainable=trainable, row_index=row_index)
    if shared_lengths.shape != (num_rows,):
        raise ValueError(f"shared_lengths has shape {tuple(shared_lengths.shape)}: needs to be ({num_rows},)")
    if not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha}: needs to be in 0 .. 1")
    lengths = trainable_per_row(trainable, row_index, num_rows).long()
    before_row = lengths.cumsum(0) - lengths  # [B]
    position = trainable.cumsum(0) - before_row[row_index]  # [N], from 1 at a row's first trainable token
    weighted = logprobs.where(position <= shared_lengths[row_index], ld_alpha * logprobs)
    return row_sums(weighted, trainable, row_index, num_rows)


def wpo_weights(
    logprobs: Tensor, log_collision: Tensor, trainable: Tensor, row_index: Tensor, num_rows: int
) -> Tensor:
    """WPO weights: how likely a response is under the policy, relative to responses that the policy samples itself.

        exp(mean over tokens of (log p(token) - log sum_v p(v)^2))

    sum_v p(v)^2 is the expected probability of a token sampled from p, so sampled responses get a weight of about 1.
    The weight of a pair is the product of the weights of its two responses.

    Args:
        logprobs: [N] nats; read at trainable tokens only.
        log_collision: [N] nats, log sum_v p(v)^2 of the distribution that each token is drawn from.
        trainable: [N] bool, tokens that have a loss.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.

    Returns:
        [B], constant; 1 in rows without a trainable token.

    Raises:
        ValueError: Shapes differ.

    Source: Zhou et al. 2024 (WPO), arXiv 2406.11827, eq. 2
    """
    check_same_shape(logprobs=logprobs, log_collision=log_collision, trainable=trainable, row_index=row_index)
    sums = row_sums((logprobs - log_collision).detach(), trainable, row_index, num_rows)
    return (sums / trainable_per_row(trainable, row_index, num_rows).clamp(min=1)).exp()
