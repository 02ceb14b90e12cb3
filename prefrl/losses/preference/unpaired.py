"""Unpaired preference losses, for single responses labeled desirable or undesirable, and weights of rows.

A log-ratio is that of a whole response: log pi(y | x) - log ref(y | x), summed over its tokens. The caller applies the
weights of desirable and undesirable rows.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from prefrl.losses.per_token import check_same_shape, row_sums, trainable_per_row


def length_desensitized(
    logprobs: Tensor, trainable: Tensor, row_index: Tensor, shared_lengths: Tensor, num_rows: int, *, ld_alpha: float
) -> Tensor:
    """Length-desensitized log-probs: tokens beyond the length of the pair's shorter response get a smaller weight.

        sum of the first `shared_lengths` log-probs + ld_alpha * sum of the others

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

    Source: Zhou et al. 2024 (WPO), arXiv 2406.11827, eq. 2
    """
    check_same_shape(logprobs=logprobs, log_collision=log_collision, trainable=trainable, row_index=row_index)
    sums = row_sums((logprobs - log_collision).detach(), trainable, row_index, num_rows)
    return (sums / trainable_per_row(trainable, row_index, num_rows).clamp(min=1)).exp()


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
