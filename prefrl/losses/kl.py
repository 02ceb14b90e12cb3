"""Per-token estimates of KL(pi || ref) from the log-probs of tokens sampled from pi.

All are in nats and zero where the two agree. As values, k1 and k3 are unbiased, for samples from pi alone. As losses
they differ: the expected gradient of k1 is zero, that of k2 is the gradient of KL(pi || ref).

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from prefrl.losses.shapes import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KL_ESTIMATORS", "k1", "k2", "k3"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Log-ratio, log pi - log ref: unbiased for samples from pi, large variance, either sign.

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


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: never negative, biased, small variance where the two are close.

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
    """exp(d) - d - 1 with d = log ref - log pi: never negative; unbiased for samples from pi.

    Nothing is clamped: where ref finds a token e^88 times as likely as pi, float32 overflows to infinity.

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
    # exp(d) - 1 loses all digits where d is small, which is where policies are trained.
    return torch.expm1(difference) - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
