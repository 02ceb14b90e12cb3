"""KL(pi || ref): estimates from the log-probs of sampled tokens, and the divergence over the whole vocabulary.

All estimates are in nats, and zero where the two policies agree. With d = log pi - log ref, for tokens sampled from pi
given their prefixes:

| name | value | expected value | expected gradient, as a loss |
|---|---|---|---|
| k1 | d | KL(pi, ref) | 0 |
| abs | abs(d) | more than KL(pi, ref) | that of sum abs(pi - ref), twice the total variation |
| k2 | d^2 / 2 | close to KL(pi, ref) where the two are close | that of KL(pi, ref) |
| k3 | exp(-d) - 1 + d | KL(pi, ref) | that of KL(ref, pi), the forward divergence |
| k1+, abs+, k3+ | as without + | as without + | that of KL(pi, ref), as with k2 |

"Given their prefixes" ignores that a token also changes the divergence of later tokens; `sequence_kl` counts that.
For tokens of another policy mu, see `importance_corrected`. `TokenScores.divergence` is not an estimate but the
divergence of the two distributions over the whole vocabulary (`divergence`).

The divergence over the whole vocabulary, one chunk of tokens at a time, is one of

| beta | D | d D / d z_j |
|---|---|---|
| 1 | KL(p, q) = sum_j p_j (log p_j - log q_j) | p_j (log p_j - log q_j - KL(p, q)) |
| 0 | KL(q, p) = sum_j q_j (log q_j - log p_j) | p_j - q_j |
| 0 .. 1 | beta KL(q, m) + (1 - beta) KL(p, m) | (1 - beta) p_j (log p_j - log m_j - KL(p, m)) |

where z are the policy's logits divided by the temperature, p = softmax(z), q is the same distribution of the
reference, and m = beta q + (1 - beta) p. Nothing is estimated from the sampled token: given the sampled prefix, value
and gradient are exact. `chunked_logprobs` and `module_logprobs` compute the divergence along with the log-probs, while
the policy's logits exist. The reference's logits are computed from its kept hidden states, chunk by chunk, in forward
and again in backward.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Tang and Munos 2025, On a few pitfalls in KL divergence
gradient estimation for RL, arXiv 2506.09477 (gradients); verl 0.9.1, `kl_penalty` (abs, and +); Agarwal et al. 2023
(GKD), arXiv 2306.13649, eq. 1 (generalized Jensen-Shannon divergence)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from prefrl.losses.per_token import check_same_shape
from prefrl.losses.truncation import Mask, TokenTruncation
from prefrl.options.policy import SequenceKLParams

# This bound keeps float32 finite and is almost never reached: of tokens sampled from q, at most one in e^20 = 5e8 has
# a larger log p - log q, because E[p / q] = 1 (Markov's inequality).
_LARGEST_EXPONENT = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Log-ratio d = log pi - log ref: unbiased for samples from pi, with a large variance and either sign.

    As a loss it has no effect on average: its gradient is that of log pi, whatever ref is, and its mean under pi is 0.

    Args:
        logprobs: [N] nats, gradient flows.
        ref_logprobs: [N] nats, treated as constant.

    Returns:
        [N] nats.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return logprobs - ref_logprobs.detach()


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """abs(log pi - log ref): never negative, biased upwards. As a loss it lowers the total variation between the two.

    Its gradient does not shrink as the two policies get closer; it is 0 only where they are equal.

    Args:
        logprobs: [N] nats, gradient flows.
        ref_logprobs: [N] nats, treated as constant.

    Returns:
        [N] nats.
    """
    return k1(logprobs, ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: never negative, biased, with a small variance where the two are close.

    As a loss on samples from pi it has the gradient of KL(pi || ref): d * grad log pi.

    Args:
        logprobs: [N] nats, gradient flows.
        ref_logprobs: [N] nats, treated as constant.

    Returns:
        [N] nats.
    """
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(x) - 1 - x with x = log ref - log pi: never negative; unbiased for samples from pi.

    As a loss on samples from pi it has the gradient of KL(ref || pi), not of KL(pi || ref). For x > 20 it continues
    along its tangent, so that neither loss nor gradient overflows or vanishes.

    Args:
        logprobs: [N] nats, gradient flows.
        ref_logprobs: [N] nats, treated as constant.

    Returns:
        [N] nats.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = ref_logprobs.detach() - logprobs
    # exp(x) - 1 loses all precision where x is small, which is the usual case in training.
    estimate = torch.expm1(difference.clamp(max=_LARGEST_EXPONENT)) - difference
    return estimate + math.exp(_LARGEST_EXPONENT) * (difference - _LARGEST_EXPONENT).clamp(min=0)


def straight_through(estimator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator's value with the gradient of k2, (log pi - log ref) * grad log pi.

    Args:
        estimator: A function like `k1`.
    """

    def with_gradient_of_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        constant = logprobs.detach()
        slope = k1(constant, ref_logprobs)
        return estimator(constant, ref_logprobs) + slope * (logprobs - constant)

    with_gradient_of_k2.__doc__ = f"{estimator.__doc__}\n    Here with the gradient of k2."
    return with_gradient_of_k2


@dataclass(frozen=True, slots=True)
class KLEstimator:
    """A row of `KL_ESTIMATORS`: `function(logprobs, ref_logprobs) -> [N]`, and its properties for tokens of pi."""

    function: Callable[[Tensor, Tensor], Tensor]
    unbiased_value: bool  # its mean is KL(pi || ref)
    unbiased_gradient: bool  # the mean of its gradient is that of KL(pi || ref), given the prefix
    source: str


_SCHULMAN = "Schulman 2020, http://joschu.net/blog/kl-approx.html"
_VERL = "verl 0.9.1, `kl_penalty`"

KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": KLEstimator(k1, True, False, _SCHULMAN),
    "abs": KLEstimator(absolute, False, False, _VERL),
    "k2": KLEstimator(k2, False, True, _SCHULMAN),
    "k3": KLEstimator(k3, True, False, _SCHULMAN),
    "k1+": KLEstimator(straight_through(k1), True, True, _VERL),
    "abs+": KLEstimator(straight_through(absolute), False, True, _VERL),
    "k3+": KLEstimator(straight_through(k3), True, True, _VERL),
}


def importance_corrected(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor, *, kl_estimator: str) -> Tensor:
    """Importance-weighted estimate r * k with r = pi / mu: gives an estimator its properties for tokens of mu.

    For an estimator with an unbiased gradient on tokens of pi (k2 and those with +) the ratio is a constant. For the
    others, gradient flows through the ratio: E_mu[r k] = E_pi[k] as a function of pi, so r * k1 and r * k3 have both
    the value and the gradient of KL(pi || ref), even where pi = mu and r is 1. All of this is given the prefixes.
    Ratios above e^20 count as e^20.

    Args:
        logprobs: [N] nats, gradient flows.
        ref_logprobs: [N] nats, treated as constant.
        log_ratio: [N] nats, log pi - log mu of each token; gradient flows.
        kl_estimator: A name in `KL_ESTIMATORS`.

    Returns:
        [N] nats.

    Raises:
        ValueError: Shapes differ, or there is no estimator of this name.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv 2512.02556 (unbiased KL estimate, k3); TRL,
        `use_bias_correction_kl`
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, log_ratio=log_ratio)
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator={kl_estimator!r}: allowed are {', '.join(KL_ESTIMATORS)}")
    row = KL_ESTIMATORS[kl_estimator]
    log_ratio = log_ratio.clamp(max=_LARGEST_EXPONENT)
    ratio = (log_ratio.detach() if row.unbiased_gradient else log_ratio).exp()
    return ratio * row.function(logprobs, ref_logprobs)


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
    """
    check_same_shape(values=values, row_index=row_index)
    precise = values.double()
    totals = precise.new_zeros(num_rows).index_add(0, row_index, precise)
    before = totals.cumsum(0) - totals
    return (precise.cumsum(0) - before[row_index]).to(values.dtype)


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """What the reference's logits at M tokens are computed from."""

    hidden: Tensor  # [M, h] last hidden states, constants; h may differ from the policy's hidden size
    head: Callable[[Tensor], Tensor]  # [m, h] -> [m, V] logits before temperature
    beta: float = 1.0  # which divergence from it is computed, see `divergence`

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(self.hidden[rows], self.head, self.beta)


def reference_log_probs(
    reference: ReferenceLogits, *, temperature: float, dtype: torch.dtype, truncation: TokenTruncation | None = None
) -> Callable[[slice, Mask | None], Tensor]:
    """A function that returns [c, V] log softmax(logits / temperature) for a slice of tokens, without gradients.

    With a truncation, the softmax is over the tokens that the policy keeps, after the same repetition penalty.
    The head runs under the autocast state of this call, even if the returned function is called later, in backward.
    Each call returns a new tensor.
    """
    device_type = reference.hidden.device.type
    autocast = partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )

    def log_probs(rows: slice, mask: Mask | None = None) -> Tensor:
        with torch.no_grad():
            with autocast():
                logits = reference.head(reference.hidden[rows])
            logits = logits.to(dtype) / temperature
            penalties = None if truncation is None else truncation[rows].penalties(logits)
            logits = logits if penalties is None else logits.mul_(penalties)
            return (logits if mask is None else mask.restrict(logits)).log_softmax(1)

    return log_probs


def full_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL divergence over the vocabulary, sum_j p_j (log p_j - log q_j), for each token.

    Args:
        log_probs: [c, V] nats, log p; gradient flows.
        ref_log_probs: [c, V] nats, log q, treated as constant.

    Returns:
        [c] nats.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return (log_probs.exp() * (log_probs - ref_log_probs.detach())).sum(1)


def divergence(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence over the vocabulary, for each token; at its ends KL(p || q), KL(q || p).

        beta KL(q || m) + (1 - beta) KL(p || m)  with  m = beta q + (1 - beta) p

    At 0 and 1 this formula is 0; there it stands for its limits after division by beta and by 1 - beta: KL(q || p) at
    beta 0, and KL(p || q) at beta 1.

    Args:
        log_probs: [c, V] nats, log p; gradient flows.
        ref_log_probs: [c, V] nats, log q, treated as constant.
        beta: 0 .. 1.

    Returns:
        [c] nats.

    Source: Agarwal et al. 2023 (GKD), arXiv 2306.13649, eq. 1
    """
    if beta == 1:
        return full_kl(log_probs, ref_log_probs)
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    reference = ref_log_probs.detach()
    if beta == 0:
        return (reference.exp() * (reference - log_probs)).sum(1)
    log_mixture = mixture(log_probs, reference, beta=beta)
    of_reference = (reference.exp() * (reference - log_mixture)).sum(1)
    return beta * of_reference + (1 - beta) * (log_probs.exp() * (log_probs - log_mixture)).sum(1)


def compared(
    logits: Tensor,
    log_normalizers: Tensor,
    probs: Tensor,
    ref_log_probs: Tensor,
    *,
    beta: float,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`divergence` of softmax(z), and what its gradient with respect to z needs besides, without autograd.

    Args:
        logits: [c, V] z.
        log_normalizers: [c] log sum exp z.
        probs: [c, V] p = softmax(z).
        ref_log_probs: [c, V] nats, log q; overwritten.
        beta: 0 .. 1.
        slopes: [c, V] room for the gradient itself; None: it is not computed.

    Returns:
        [c] nats, the divergence; and [c] sum_j p_j (z_j - log q_j), with m for q where 0 < beta < 1, None at 0.
    """
    # Log-probs are subtracted before summing: where the two are close the terms are small and stay precise.
    of_reference = torch.zeros_like(log_normalizers)
    if beta < 1:
        log_probs = logits - log_normalizers[:, None]
        log_other = log_probs if beta == 0 else mixture(log_probs, ref_log_probs, beta=beta)
        ref_probs = ref_log_probs.exp()
        of_reference = (ref_log_probs.sub_(log_other).mul_(ref_probs)).sum(1)
        if beta == 0:
            if slopes is not None:
                torch.sub(probs, ref_probs, out=slopes)
            return of_reference, None
        ref_log_probs = log_other
    terms = ref_log_probs.neg_().add_(logits).sub_(log_normalizers[:, None]).mul_(probs)
    kl = terms.sum(1)
    if slopes is not None:
        torch.addcmul(terms, probs, kl[:, None], value=-1, out=slopes)
        if beta < 1:
            slopes.mul_(1 - beta)
    return kl if beta == 1 else beta * of_reference + (1 - beta) * kl, kl + log_normalizers


def mixture(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float) -> Tensor:
    """[c, V] log m with m = beta q + (1 - beta) p, from log p and log q, for beta between 0 and 1."""
    return torch.logaddexp(log_probs + math.log1p(-beta), ref_log_probs + math.log(beta))


def completion_kl(
    divergences: Tensor,
    log_ratio: Tensor,
    trainable: Tensor,
    row_index: Tensor,
    groups: Sequence[int],
    longest: int,
) -> Tensor:
    """KL(pi || ref) of whole completions, from the divergence D_t = KL(pi || ref) of each token's distribution.

    With W_t = prod_{j < t} pi_j / mu_j over the trainable tokens of a row that mu sampled, its value and its gradient
    are, summed over the tokens of a row,

        E_mu[sum_t W_t D_t] = KL(pi || ref)
        E_mu[sum_t W_t grad D_t + sum_t A_t grad log pi_t] = grad KL(pi || ref)
        A_t = sum_{s > t} W_s D_s - W_{t+1} b_t

    both exactly: the divergence at a token is computed over the whole vocabulary, and A_t is the token's credit for
    the divergence of later tokens. The baseline b_t is the mean over the other rows of the group of their sum over
    s > t, 0 where they have ended. It changes no expectation, because it depends on other samples, and lowers the
    variance where these sums vary less than they are large. On samples of pi, all weights are 1.

    Args:
        divergences: [N] nats, KL(pi || ref) over the vocabulary; gradient flows.
        log_ratio: [N] nats, log pi - log mu of each sampled token; gradient flows.
        trainable: [N] bool, tokens that the policy chose; the others are not read and get 0.
        row_index: [N] int64, row of each token, in 0 .. B-1; rows are laid end to end in this order.
        groups: [B] group of each row: whole groups. A row that is alone in its group has no baseline.
        longest: Trainable tokens of the row with the most of them, or more.

    Returns:
        [N] nats.

    Source: Agarwal et al. 2023 (GKD), arXiv 2306.13649 (D_t); Amini et al. 2025, arXiv 2504.10637 (Rao-Blackwellized
        estimate of the value and gradient of the KL divergence of sequences)
    """
    check_same_shape(divergences=divergences, log_ratio=log_ratio, trainable=trainable, row_index=row_index)
    num_rows = len(groups)
    log_ratio = log_ratio.where(trainable, 0.0)
    log_weights = row_prefix_sums(log_ratio.detach(), row_index, num_rows)  # of W_{t+1}
    weighted = (log_weights - log_ratio.detach()).exp() * divergences.where(trainable, 0.0)
    sums = weighted.detach()
    totals = sums.new_zeros(num_rows).index_add(0, row_index, sums)
    later = totals[row_index] - row_prefix_sums(sums, row_index, num_rows)
    credit = later - log_weights.exp() * _mean_of_others(later, trainable, row_index, groups, longest)
    return weighted + (credit * (log_ratio - log_ratio.detach())).where(trainable, 0.0)


def _mean_of_others(values: Tensor, trainable: Tensor, row_index: Tensor, groups: Sequence[int], width: int) -> Tensor:
    """[N] mean over the other rows of a group of their values at the same trainable token, counted from the first."""
    numbers, sizes = {group: number for number, group in enumerate(dict.fromkeys(groups))}, Counter(groups)
    of_rows = [[numbers[group] for group in groups], [max(sizes[group] - 1, 1) for group in groups]]
    group_index, num_others = torch.tensor(of_rows).to(values.device, non_blocking=True)
    place = (row_prefix_sums(trainable.long(), row_index, len(groups)) - 1).clamp(min=0)
    cell = row_index * width + place
    table = values.new_zeros(len(groups) * width).index_add(0, cell, values.where(trainable, 0.0))
    table = table.view(len(groups), width)
    sums = table.new_zeros(len(numbers), width).index_add(0, group_index, table)
    means: Tensor = (sums[group_index] - table) / num_others[:, None]
    return means.flatten()[cell]
