"""Inputs and results of a policy loss, the importance ratio of tokens or of whole rows, masks and extra terms.

Also the tokens that `clip_cov` and `kl_cov` treat differently: their log-probs and advantages vary together most.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefrl.losses.per_token import check_same_shape, row_sums, trainable_per_row
from prefrl.options.policy import CovarianceBand, HighestCovariance, ImportanceLevel

# Ratios without another bound are limited to e^20. That is far beyond what a policy can be trained on, and products
# with advantages and their gradients stay finite in every dtype but float16.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each token and its statistics for logging."""

    loss: Tensor  # [N], gradient flows
    stats: dict[str, Tensor]  # [N] float each, constants; the caller averages them over trainable tokens


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """Response tokens of B rows, laid end to end. Tokens that are not trainable are not read, and their loss is 0."""

    logprobs: Tensor  # [N] nats, log pi; gradient flows
    old_logprobs: Tensor  # [N] nats, constants: log-probs before the first update from this generation batch
    advantages: Tensor  # [N], constants
    trainable: Tensor  # [N] bool: tokens that have a loss
    row_index: Tensor  # [N] int64: row of each token, in 0 .. B-1
    num_rows: int
    level: ImportanceLevel = "token"
    cov_tokens: Tensor | None = None  # [N] bool: tokens that clip_cov and kl_cov treat differently

    def __post_init__(self) -> None:
        """Check shapes, detach the constants, and set advantages to 0 where there is no loss."""
        optional = {} if self.cov_tokens is None else {"cov_tokens": self.cov_tokens}
        check_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            trainable=self.trainable,
            row_index=self.row_index,
            **optional,
        )
        object.__setattr__(self, "old_logprobs", self.old_logprobs.detach())
        object.__setattr__(self, "advantages", self.advantages.detach().where(self.trainable, 0.0))

    @property
    def trainable_logprobs(self) -> Tensor:
        """[N] nats: log pi; 0 where not trainable."""
        return self.logprobs.where(self.trainable, 0.0)

    @property
    def log_ratio(self) -> Tensor:
        """Log of the importance ratio pi / old at `level`, with d = log pi - log old of a token and sg = constant.

            token:           d
            sequence:        mean of d over the trainable tokens of the row: GSPO
            sequence_token:  sg[mean of d] + log pi - sg[log pi]: GSPO-token
            sequence_sum:    sum of d over the trainable tokens of the row, within -20 .. 20: ratio of the whole row

        All levels but `token` give every token of a row the same value. At `sequence` and `sequence_sum` the gradient
        of each of these values reaches all trainable tokens of the row; at `sequence_token` it reaches only its own
        token. If all advantages in a row are equal, the mean of its loss over tokens has the same gradient at
        `sequence` and `sequence_token`.

        Returns:
            [N] nats. Gradient flows, except where the sum is out of bounds. At level `token`, 0 where not trainable.

        Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 7 (sequence) and section 4.3 (sequence_token); Ahmadian
            et al. 2024 (RLOO), arXiv 2402.14740 (sequence_sum)
        """
        log_ratio = (self.logprobs - self.old_logprobs).where(self.trainable, 0.0)
        if self.level == "token":
            return log_ratio
        if self.level == "sequence_sum":
            sums = row_sums(log_ratio, self.trainable, self.row_index, self.num_rows)
            return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[self.row_index]
        means = self.row_means(log_ratio)
        if self.level == "sequence":
            return means[self.row_index]
        return means.detach()[self.row_index] + log_ratio - log_ratio.detach()

    def row_means(self, values: Tensor) -> Tensor:
        """[B] mean of [N] values over the trainable tokens of each row; 0 in rows without one. Gradient flows."""
        sums = row_sums(values, self.trainable, self.row_index, self.num_rows)
        return sums / trainable_per_row(self.trainable, self.row_index, self.num_rows).clamp(min=1).to(sums.dtype)


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

    Source: Yue et al. 2025 (VAPO), arXiv 2504.05118, section 4.3
    """
    check_same_shape(logprobs=tokens.logprobs, is_positive=is_positive)
    return -tokens.trainable_logprobs.where(is_positive, 0.0)


@dataclass(frozen=True, slots=True)
class CovarianceSums:
    """Scalar sums over trainable tokens. They can be added over ranks; divided by `num_tokens` they are the means."""

    logprobs: Tensor  # float64, nats
    advantages: Tensor  # float64
    num_tokens: Tensor  # int64


def covariance_sums(logprobs: Tensor, advantages: Tensor, trainable: Tensor) -> CovarianceSums:
    """Sums for the means in `covariance`, in float64, where the order of summation hardly matters.

    Args:
        logprobs: [N] nats, treated as constant; read at trainable tokens only.
        advantages: [N], treated as constant; read at trainable tokens only.
        trainable: [N] bool, tokens that have a loss.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, trainable=trainable)
    return CovarianceSums(
        logprobs=logprobs.detach().where(trainable, 0.0).sum(dtype=torch.float64),
        advantages=advantages.detach().where(trainable, 0.0).sum(dtype=torch.float64),
        num_tokens=trainable.sum(),
    )


def covariance(
    logprobs: Tensor, advantages: Tensor, trainable: Tensor, *, mean_logprob: float, mean_advantage: float
) -> Tensor:
    """Contribution of each token to the covariance of log-probs and advantages: (A - mean A) (log pi - mean log pi).

    Args:
        logprobs: [N] nats, treated as constant; read at trainable tokens only.
        advantages: [N], treated as constant; read at trainable tokens only.
        trainable: [N] bool, tokens that have a loss.
        mean_logprob: Mean over trainable tokens of all ranks, nats.
        mean_advantage: Mean over trainable tokens of all ranks.

    Returns:
        [N]; 0 where not trainable.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, trainable=trainable)
    products = (advantages.detach() - mean_advantage) * (logprobs.detach() - mean_logprob)
    return products.where(trainable, 0.0)


def token_keys(row_seeds: Sequence[int], row_lengths: Sequence[int]) -> Tensor:
    """A random number for each token that depends only on its row's seed and its position in the row.

    Args:
        row_seeds: B entries. A row's seed must not depend on the rank that holds the row.
        row_lengths: B entries, the number of response tokens.

    Returns:
        [N] float64 on the CPU, uniform in 0 .. 1.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in row_seeds]
    rows = [
        torch.rand(length, generator=generator, dtype=torch.float64)
        for generator, length in zip(generators, row_lengths, strict=True)
    ]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.float64)


def select_clip_cov(covariances: Tensor, trainable: Tensor, keys: Tensor, params: CovarianceBand) -> Tensor:
    """Select a random subset of the tokens whose covariance is in (lb, ub): those with the smallest keys.

    The number selected is `ratio` of all trainable tokens, rounded down but at least one, or all candidates if there
    are fewer.

    Args:
        covariances: [N], see `covariance`; tokens of all ranks.
        trainable: [N] bool, tokens that have a loss.
        keys: [N] random numbers, see `token_keys`.
        params: `ratio`, `lb` and `ub`.

    Returns:
        [N] bool.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (Clip-Cov)
    """
    check_same_shape(covariances=covariances, trainable=trainable, keys=keys)
    is_candidate = trainable & (covariances > params.lb) & (covariances < params.ub)
    order = keys.where(is_candidate, math.inf).argsort(stable=True)
    return _first(order, is_candidate, _share(trainable, params.ratio))


def select_kl_cov(covariances: Tensor, trainable: Tensor, keys: Tensor, params: HighestCovariance) -> Tensor:
    """Select the tokens with the largest covariance: `ratio` of all trainable ones, rounded down, at least one.

    Ties are common among tokens that the policy is certain of; they are broken by the smallest keys.

    Args:
        covariances: [N], see `covariance`; tokens of all ranks.
        trainable: [N] bool, tokens that have a loss.
        keys: [N] random numbers, see `token_keys`.
        params: `ratio`.

    Returns:
        [N] bool.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (KL-Cov)
    """
    check_same_shape(covariances=covariances, trainable=trainable, keys=keys)
    by_key = keys.argsort(stable=True)
    by_covariance = covariances.where(trainable, -math.inf)[by_key].argsort(descending=True, stable=True)
    return _first(by_key[by_covariance], trainable, _share(trainable, params.ratio))


def _share(trainable: Tensor, ratio: float) -> int:
    return max(int(trainable.sum().item() * ratio), 1)


def _first(order: Tensor, is_candidate: Tensor, count: int) -> Tensor:
    """[N] bool: the first `count` tokens in `order`, which lists the candidates first."""
    selected = torch.zeros_like(is_candidate)
    selected[order[: min(count, int(is_candidate.sum()))]] = True
    return selected
