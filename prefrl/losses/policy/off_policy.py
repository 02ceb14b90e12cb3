"""Importance weights for samples of another policy: an inference engine that rounds differently, or older weights.

Samples come from mu, and the loss is an expectation under pi, the trained policy before the update:

    E_pi[f] = E_mu[w f],  w = pi / mu

The ratio of whole responses, `sequence`, is unbiased, but its variance grows with their length. The ratio of single
tokens, `token`, ignores that the earlier tokens came from mu as well, so its bias grows with the length instead.
`geometric` is the geometric mean of a response's token ratios. Bounds trade bias for variance: `truncate` clips ratios
to the bounds, `mask` sets the weight of ratios outside them to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from prefrl.losses.per_token import check_same_shape, row_sums, trainable_per_row

Level = Literal["token", "sequence", "geometric"]
Bound = Literal["truncate", "mask"]

# Every ratio is clipped to e^-30 .. e^30: the sum of 1e12 of their squares is still finite in float32.
_MAX_LOG_RATIO = 30.0


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """The weight of each token, and scalar statistics of the ratios, before any bound other than e^-30 .. e^30.

    All are constants. At level `token` there is one ratio per trainable token, else one per row that has a trainable
    token. To combine batches, add sums and counts, and merge minima and maxima; without a trainable token, these are
    +inf and -inf. The effective sample size, as a share, is (ratio_sum)^2 / (num_ratios * ratio_square_sum): Kong
    1992, A Note on Importance Sampling using Standardized Weights.
    """

    weights: Tensor  # [N]; 0 where not trainable
    difference_sum: Tensor  # of |log pi - log mu| over trainable tokens, nats
    difference_max: Tensor  # nats
    num_tokens: Tensor  # trainable tokens
    ratio_sum: Tensor
    ratio_square_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    num_ratios: Tensor
    num_cut: Tensor  # ratios outside `low` .. `high`


def importance_weights(
    log_ratio: Tensor,
    trainable: Tensor,
    row_index: Tensor,
    num_rows: int,
    *,
    level: Level,
    bound: Bound,
    low: float | None,
    high: float | None,
) -> ImportanceWeights:
    """Weights for the loss of each token, so that samples of mu stand in for samples of pi.

    With d = log pi - log mu of a token, and the sum or mean over the trainable tokens of its row:

        token: r = exp(d);  sequence: r = exp(sum d);  geometric: r = exp(mean d)
        truncate: w = min(max(r, low), high);  mask: w = r if low <= r <= high else 0

    The bounds are applied to the logarithm, so nothing overflows. NaN stays NaN.

    Args:
        log_ratio: [N] nats, log pi - log mu, treated as constant; read at trainable tokens only.
        trainable: [N] bool, tokens that have a loss; the others get weight 0.
        row_index: [N] int64, row of each token, in 0 .. B-1.
        num_rows: B.
        level: Whether a ratio is a token's, a whole row's, or the geometric mean over a row's tokens.
        bound: What happens to ratios outside `low` .. `high`.
        low: Smallest ratio, in 0 .. 1; None: no bound.
        high: Largest ratio, at least 1; None: no bound.

    Returns:
        Weights [N] in the dtype of `log_ratio`, and statistics.

    Raises:
        ValueError: Shapes differ, or the bounds exclude 1, the ratio of a sample from pi itself.

    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
        https://fengyao.notion.site/off-policy-rl (truncate); Liu et al. 2025, When Speed Kills Stability: Demystifying
        RL Collapse from the Training-Inference Mismatch (sequence, mask); Zheng et al. 2025 (GSPO), arXiv 2507.18071,
        eq. 7 (geometric)
    """
    check_same_shape(log_ratio=log_ratio, trainable=trainable, row_index=row_index)
    if (low is not None and not 0 < low <= 1) or (high is not None and not 1 <= high < math.inf):
        raise ValueError(f"low={low}, high={high}: need 0 < low <= 1 <= high; None means no bound")
    log_ratio = log_ratio.detach()
    logs, counted = log_ratio, trainable
    if level != "token":
        num_trainable = trainable_per_row(trainable, row_index, num_rows).to(log_ratio.dtype)
        logs, counted = row_sums(log_ratio, trainable, row_index, num_rows), num_trainable > 0
        if level == "geometric":
            logs = logs / num_trainable.clamp(min=1)
    lowest = -math.inf if low is None else math.log(low)
    highest = math.inf if high is None else math.log(high)
    is_cut = (logs < lowest) | (logs > highest)
    ratio = logs.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if bound == "truncate":
        limits = max(lowest, -_MAX_LOG_RATIO), min(highest, _MAX_LOG_RATIO)
        weights = logs.clamp(*limits).exp()
    else:
        weights = ratio.masked_fill(is_cut, 0.0)
    weights = weights if level == "token" else weights[row_index]
    return _result(weights.where(trainable, 0.0), log_ratio, trainable, ratio, counted, is_cut)


def _result(
    weights: Tensor, log_ratio: Tensor, trainable: Tensor, ratio: Tensor, counted: Tensor, is_cut: Tensor
) -> ImportanceWeights:
    """Statistics of the log-ratios of `trainable` tokens and of the `counted` ratios."""
    difference = log_ratio.abs()
    return ImportanceWeights(
        weights=weights,
        difference_sum=difference.where(trainable, 0.0).sum(),
        difference_max=difference.where(trainable, -math.inf).max(),
        num_tokens=trainable.sum(),
        ratio_sum=ratio.where(counted, 0.0).sum(),
        ratio_square_sum=ratio.square().where(counted, 0.0).sum(),
        ratio_min=ratio.where(counted, math.inf).min(),
        ratio_max=ratio.where(counted, -math.inf).max(),
        num_ratios=counted.sum(),
        num_cut=(is_cut & counted).sum(),
    )


@dataclass(frozen=True, slots=True)
class OffPolicyCorrection:
    """A row of `OFF_POLICY_CORRECTIONS`: two arguments of `importance_weights`."""

    level: Level
    bound: Bound
    source: str


_TRUNCATED = "Yao et al. 2025, https://fengyao.notion.site/off-policy-rl"
_MASKED = "Liu et al. 2025, When Speed Kills Stability"
_GEOMETRIC = "ratio: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 7"

# TRL's names, and two of our own (geometric_*).
OFF_POLICY_CORRECTIONS: dict[str, OffPolicyCorrection] = {
    "token_truncate": OffPolicyCorrection("token", "truncate", _TRUNCATED),
    "token_mask": OffPolicyCorrection("token", "mask", _MASKED),
    "sequence_truncate": OffPolicyCorrection("sequence", "truncate", _MASKED),
    "sequence_mask": OffPolicyCorrection("sequence", "mask", _MASKED),
    "geometric_truncate": OffPolicyCorrection("geometric", "truncate", _GEOMETRIC),
    "geometric_mask": OffPolicyCorrection("geometric", "mask", _GEOMETRIC),
}
