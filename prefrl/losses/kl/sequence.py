"""The KL divergence of whole sequences from samples of any policy, including a token's effect on later tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prefrl.losses.checks import check_same_shape
from prefrl.options.policy import SequenceKLParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_prefix_sums", "sequence_kl"]


def sequence_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    log_ratio: Tensor,
    trainable: Tensor,
    row_index: Tensor,
    num_rows: int,
    params: SequenceKLParams,
) -> Tensor:
    """W_s d_s with d_s = log pi_s - log ref_s and W_s = prod_{j <= s} pi_j / mu_j over the row's trainable tokens.

    For rows sampled from mu, summed over the tokens of a row:

        E_mu[sum_s W_s d_s] = KL(pi || ref),  E_mu[sum_s W_s d_s sum_{j <= s} grad log pi_j] = grad KL(pi || ref)

    both exactly, including the distribution of prefixes. d is a constant here (W_s grad d_s is 0 on average), and
    gradient flows through W. Each token gets credit for the divergence of all later tokens of its row. On samples of
    pi itself, where W is 1, the gradient is sum_j grad log pi_j sum_{s >= j} d_s. It is the gradient of the divergence
    only if the losses of a row are summed: a mean over a row's tokens would weight rows by their lengths.

    The variance of W grows with the length of rows. `weight_cap` clips the weights from above, before the
    exponential. Gradient still flows through a clipped weight, scaled by the cap, so that the pull towards ref remains
    where pi has moved far from mu. The value is then off by at most E_pi[sum_s abs(d_s) (1 - cap / W_s)+], in either
    direction, and is exact where all W_s are at most the cap.

    Args:
        logprobs: [N] nats, log pi, treated as constant: gradient flows through `log_ratio`.
        ref_logprobs: [N] nats, treated as constant.
        log_ratio: [N] nats, log pi - log mu of each token; gradient flows.
        trainable: [N] bool, tokens that the policy chose; the others are not read and get 0.
        row_index: [N] int64, row of each token, in 0 .. B-1; rows are laid end to end in this order.
        num_rows: B.
        params: The largest weight. Without a bound, float32 overflows where log W is above 88.

    Returns:
        [N] nats in the dtype of `logprobs`.

    Raises:
        ValueError: Shapes differ.

    Source: Tang and Munos 2025, arXiv 2506.09477 (the gradient on samples of pi)
    """
    check_same_shape(
        logprobs=logprobs, ref_logprobs=ref_logprobs, log_ratio=log_ratio, trainable=trainable, row_index=row_index
    )
    log_weights = row_prefix_sums(log_ratio.where(trainable, 0.0), row_index, num_rows)
    constant = log_weights.detach()
    capped = constant if params.weight_cap is None else constant.clamp(max=math.log(params.weight_cap))
    difference = (logprobs - ref_logprobs).detach().where(trainable, 0.0)
    return capped.exp() * difference * (1 + log_weights - constant)


def row_prefix_sums(values: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """Cumulative sum of the values within each row, each token included; gradient flows.

    Accumulated in float64, because one cumulative sum runs over all rows and the total of the earlier rows is then
    subtracted.

    Args:
        values: [N].
        row_index: [N] int64, row of each token, in 0 .. B-1; rows are laid end to end in this order.
        num_rows: B.

    Returns:
        [N] in the unit and dtype of `values`.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(values=values, row_index=row_index)
    precise = values.double()
    totals = precise.new_zeros(num_rows).index_add(0, row_index, precise)
    before = totals.cumsum(0) - totals
    return (precise.cumsum(0) - before[row_index]).to(values.dtype)
