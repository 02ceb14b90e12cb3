"""Select the tokens that lower the policy's entropy most: those with a high covariance of log-prob and advantage.

    cov_t = (A_t - mean A) * (log pi_t - mean log pi), means over all trainable tokens of a generation batch

Tokens are selected once per generation batch, over all ranks. Random choices use numbers that are tied to the tokens,
so an update does not depend on how its step is split into micro-batches and ranks.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.

Source: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models,
    arXiv 2505.22617, section 4.2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prefrl.losses.per_token import check_same_shape
from prefrl.options.policy import CovarianceBand, HighestCovariance

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CovarianceSums",
    "covariance",
    "covariance_sums",
    "select_clip_cov",
    "select_kl_cov",
    "token_keys",
]


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
