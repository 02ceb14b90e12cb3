"""Per-token estimators of KL(pi || ref) from the log-probs of sampled tokens, and their table.

All are in nats, and zero where the two policies agree. With d = log pi - log ref, for tokens sampled from pi given
their prefixes:

| name | value | expected value | expected gradient, as a loss |
|---|---|---|---|
| k1 | d | KL(pi, ref) | 0 |
| abs | abs(d) | more than KL(pi, ref) | that of sum abs(pi - ref), twice the total variation |
| k2 | d^2 / 2 | close to KL(pi, ref) where the two are close | that of KL(pi, ref) |
| k3 | exp(-d) - 1 + d | KL(pi, ref) | that of KL(ref, pi), the forward divergence |
| k1+, abs+, k3+ | as without + | as without + | that of KL(pi, ref), as with k2 |

"Given their prefixes" ignores that a token also changes the divergence of later tokens; `sequence_kl` counts that.
For tokens of another policy mu, see `importance_corrected`. `TokenScores.full_kl` is not an estimate but the
divergence of the two distributions over the whole vocabulary (`full_kl`).

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Tang and Munos 2025, On a few pitfalls in KL divergence
gradient estimation for RL, arXiv 2506.09477 (gradients); verl 0.9.1, `kl_penalty` (abs, and +)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KL_ESTIMATORS",
    "KLEstimator",
    "absolute",
    "importance_corrected",
    "k1",
    "k2",
    "k3",
    "straight_through",
]

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

    Raises:
        ValueError: Shapes differ.
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

    Raises:
        ValueError: Shapes differ.
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

    Raises:
        ValueError: Shapes differ.
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

    Raises:
        ValueError: Shapes differ.
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
