"""The divergence from a reference of which only some likely tokens are known; all other tokens are one bucket.

With K, the kept tokens of a row, and z, the policy's logits divided by the temperature, policy and reference become
distributions over k + 1 buckets:

    p' = (p_j for j in K, 1 - sum over K of p_j),  q' = (q_j for j in K, 1 - sum over K of q_j)

p' is the softmax of k + 1 logits: z_j for j in K, and log sum exp of the others. The divergence is that of
`losses.kl.divergence` from these. It is at most the divergence over the whole vocabulary, for any K (data-processing
inequality), and equal to it if the policy agrees with the reference on how likely the other tokens are among
themselves. With k = V there is no last bucket. Its gradient, with g = d D / d (logits of the buckets), is

    d D / d z_j = g_j for j in K,  g_others p_j / p'_others for the others

so no token outside K moves relative to the other ones outside K.

With a truncation, q' is restricted to the tokens that the policy keeps, and its last bucket stays whole unless the
policy keeps none of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prefrl.losses.kl import ReferenceLogits, divergence, reference_log_probs
from prefrl.losses.truncation import FLOOR, Mask, TokenTruncation


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The log-probs of a reference's most likely tokens, at each of M tokens and at the policy's temperature.

    All probabilities are divided by their sum. `others` is for log-probs that were rounded: from those of float16,
    1 - sum is off by up to 2e-4. Without it, and where the sum is 1 or more, the others have the probability of the
    least likely token that is kept.
    """

    ids: Tensor  # [M, k] integers in 0 .. V-1, none twice in a row
    logprobs: Tensor  # [M, k] nats, of any float dtype; finite
    beta: float = 1.0  # see `losses.kl.divergence`
    others: Tensor | None = None  # [M] nats, of all other tokens together; None: log(1 - sum)

    def __getitem__(self, rows: slice | Tensor) -> Self:
        others = None if self.others is None else self.others[rows]
        return type(self)(self.ids[rows], self.logprobs[rows], self.beta, others)

    def divergence(self, logits: Tensor, mask: Mask | None) -> Tensor:
        """[M] nats, from logits [M, V] divided by the temperature, and restricted to S; gradient flows."""
        log_probs = _bucket_logits(logits, self.ids.long()).log_softmax(1)
        return divergence(log_probs, self._log_probs(logits, mask), beta=self.beta)

    def gradient(self, logits: Tensor, mask: Mask | None, grad: Tensor) -> TopGradient:
        """Of the divergence at the same logits, with the gradient [M] of each divergence."""
        ids = self.ids.long()
        buckets = _bucket_logits(logits, ids).requires_grad_()
        with torch.enable_grad():
            log_probs = buckets.log_softmax(1)
            value = divergence(log_probs, self._log_probs(logits, mask), beta=self.beta)
        (of_buckets,) = torch.autograd.grad(value, buckets, grad)
        return TopGradient(ids, of_buckets, log_probs.detach()[:, -1:])

    def _log_probs(self, logits: Tensor, mask: Mask | None) -> Tensor:
        """[M, k + 1] log q'."""
        ids, kept = self.ids.long(), self.logprobs.double()
        num_others = logits.size(1) - ids.size(1)
        if num_others == 0:
            others = torch.full_like(kept[:, :1], FLOOR)
        elif self.others is None:
            rest = 1 - kept.exp().sum(1, keepdim=True)
            others = rest.log().where(rest > 0, kept.amin(1, keepdim=True))
        else:
            others = self.others.double()[:, None].clamp(min=FLOOR)
        if mask is not None:
            is_outside = mask.is_outside.gather(1, ids)
            is_equal = None if mask.is_equal is None else mask.is_equal.gather(1, ids)
            kept = Mask(is_outside, is_equal, mask.log_share).restrict(kept.clone())
            num_outside = [outside.sum(1, keepdim=True) for outside in (mask.is_outside, is_outside)]
            others = others.where(num_outside[0] - num_outside[1] < num_others, FLOOR)
        return torch.cat([kept, others], 1).log_softmax(1).to(logits.dtype)


def _bucket_logits(logits: Tensor, ids: Tensor) -> Tensor:
    """[M, k + 1] logits of the kept tokens, and log sum exp of the others, from logits [M, V] and ids [M, k]."""
    others = logits.scatter(1, ids, FLOOR).logsumexp(1, keepdim=True)
    return torch.cat([logits.gather(1, ids), others], 1)


@dataclass(frozen=True, slots=True)
class TopGradient:
    """The gradient of a divergence with respect to logits [c, V]."""

    ids: Tensor  # [c, k] int64
    of_buckets: Tensor  # [c, k + 1]
    log_others: Tensor  # [c, 1] nats, log p' of the last bucket

    def add_to(self, grads: Tensor, probs: Tensor) -> None:
        """Add it, in place, to the gradients [c, V] of tokens with the probabilities [c, V]."""
        of_kept = grads.gather(1, self.ids).add_(self.of_buckets[:, :-1])
        # The bound keeps the quotient finite; all probabilities behind it are 0 in this dtype.
        smallest = torch.finfo(grads.dtype).tiny
        grads.addcmul_(probs, self.of_buckets[:, -1:] / self.log_others.exp().clamp(min=smallest))
        grads.scatter_(1, self.ids, of_kept)


ReferenceDistribution = ReferenceLogits | TopLogprobs


def ref_log_probs_of(
    reference: ReferenceDistribution,
    hidden: Tensor,
    temperature: float,
    truncation: TokenTruncation | None,
    dtype: torch.dtype,
) -> Callable[[slice, Mask | None], Tensor] | None:
    """See `reference_log_probs`; None without a whole distribution. Rejects another number of tokens."""
    if isinstance(reference, ReferenceLogits):
        if reference.hidden.shape[:-1] != hidden.shape[:1]:
            found = f"reference.hidden {tuple(reference.hidden.shape)}, hidden {tuple(hidden.shape)}"
            raise ValueError(f"{found}: need to be [M, h] each")
        return reference_log_probs(reference, temperature=temperature, truncation=truncation, dtype=dtype)
    shapes = [tuple(tensor.shape) for tensor in (reference.ids, reference.logprobs)]
    has_others = reference.others is None or reference.others.shape == hidden.shape[:1]
    if not has_others or shapes[0] != shapes[1] or shapes[0][:-1] != hidden.shape[:1] or not shapes[0][-1]:
        raise ValueError(
            f"reference.ids {shapes[0]}, reference.logprobs {shapes[1]}, hidden {tuple(hidden.shape)}: need to be "
            "[M, k], [M, k] and [M, h], and reference.others [M] if it is given"
        )
    if truncation is not None and truncation.history is not None:
        raise ValueError(
            "repetition_penalty with log-probs of likely tokens: it changes the logits of a reference, which are "
            "not known. Set repetition_penalty=1, or compare with whole distributions."
        )
    return None
