"""KL(pi || ref) over the whole vocabulary, one chunk of tokens at a time.

    KL = sum_j p_j (log p_j - log q_j)        d KL / d z_j = p_j (log p_j - log q_j - KL)

z are the policy's logits divided by the temperature, p = softmax(z), and q is the same distribution of the reference.
Nothing is estimated from the sampled token: given the sampled prefix, value and gradient are exact. `chunked_logprobs`
and `module_logprobs` compute the divergence along with the log-probs, while the policy's logits exist. The reference's
logits are computed from its kept hidden states, chunk by chunk, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.truncation import Mask, TokenTruncation

__all__ = ["ReferenceLogits", "full_kl", "reference_log_probs"]


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """What the reference's logits at M tokens are computed from."""

    hidden: Tensor  # [M, h] last hidden states, constants; h may differ from the policy's hidden size
    head: Callable[[Tensor], Tensor]  # [m, h] -> [m, V] logits before temperature


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

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return (log_probs.exp() * (log_probs - ref_log_probs.detach())).sum(1)
