"""Masks and extra terms of a policy loss, besides the importance weights of `off_policy` and the KL term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefrl.losses.checks import check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.policy.tokens import PolicyTokens

__all__ = ["off_policy_sequence_mask", "positive_nll"]


def off_policy_sequence_mask(
    tokens: PolicyTokens, sampling_logprobs: Tensor, *, off_policy_mask_threshold: float
) -> Tensor:
    """0 for tokens with A < 0 in rows that the policy has moved away from since sampling, else 1.

    A row counts as off-policy if the mean of log mu - log pi over its trainable tokens is above the threshold, where
    mu is the policy that it was sampled from. Dropped tokens still count in the loss denominator.

    Args:
        tokens: The tokens; everything is treated as constant.
        sampling_logprobs: [N] nats, log mu; read at trainable tokens only. A row with NaN is kept.
        off_policy_mask_threshold: Nats, not negative.

    Returns:
        [N] 0 or 1, in the dtype of the log-probs.

    Raises:
        ValueError: Shapes differ, or the threshold is negative.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv 2512.02556, eq. 9
    """
    check_same_shape(logprobs=tokens.logprobs, sampling_logprobs=sampling_logprobs)
    if not off_policy_mask_threshold >= 0:
        raise ValueError(f"off_policy_mask_threshold={off_policy_mask_threshold}: nats, needs to be >= 0")
    distance = tokens.row_means(sampling_logprobs.detach() - tokens.logprobs.detach())
    is_dropped = (tokens.advantages < 0) & (distance > off_policy_mask_threshold)[tokens.row_index]
    return (~is_dropped).to(tokens.logprobs.dtype)


def positive_nll(tokens: PolicyTokens, is_positive: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens of good responses, as in supervised training: -log pi.

    It is averaged over the tokens of good responses, not over all tokens, so it has its own count:
    `(is_positive & trainable).sum()`.

    Args:
        tokens: The tokens; gradient flows to their log-probs.
        is_positive: [N] bool, tokens of responses to imitate.

    Returns:
        [N] nats; 0 at other tokens, and where not trainable.

    Raises:
        ValueError: Shapes differ.

    Source: Yue et al. 2025 (VAPO), arXiv 2504.05118, section 4.3
    """
    check_same_shape(logprobs=tokens.logprobs, is_positive=is_positive)
    return -tokens.trainable_logprobs.where(is_positive, 0.0)
