"""Policy-gradient losses for each token, and the table of them.

Symbols of the formulas, for each token:

    A      advantage, a constant
    pi     probability of the token under the trained policy; old: under the policy before the first update
    r      importance ratio pi / old, of the token or of its row: `PolicyTokens.log_ratio`
    sg[x]  x as a constant
    clip   clip(r, low, high) = min(max(r, low), high)

At r = 1 every loss has the policy gradient, -A * (gradient of log pi), except for the tokens that clip_cov drops.
Bounds are applied to log r before exp: the gradient of an overflowing ratio is infinity times zero, NaN, even where
the ratio is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from prefrl.losses.policy.tokens import MAX_LOG_RATIO, PolicyTokens, TokenLoss, select_clip_cov, select_kl_cov
from prefrl.options.policy import (
    POLICY_LOSS_FACTS,
    AipoParams,
    BoundParams,
    ClipCovParams,
    ClipParams,
    DppoParams,
    GmpoParams,
    ImportanceLevel,
    KlCovParams,
    LossType,
    PolicyLossParams,
    Reduction,
    SapoParams,
    VespoParams,
)


def clipped_surrogate(tokens: PolicyTokens, params: ClipParams) -> TokenLoss:
    """PPO's surrogate with separate bounds: -min(r' A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r' = min(r, delta).

    The clip limits only the side that the advantage favors. `delta` limits large ratios where A < 0, for which the
    plain surrogate has no bound. This is the dual clip; where A < 0,

        -min(r' A, clip(r) A) = min(max(-r A, -clip(r) A), -delta A)

    Args:
        tokens: The tokens.
        params: The bounds.

    Returns:
        loss [N], and 0/1 indicators of ratios outside the clip range, on the side that the clip limits:
        `clip_ratio/low` (r < 1 - epsilon and A < 0), `clip_ratio/high` (r > 1 + epsilon_high and A > 0) and
        `clip_ratio/region` (either).

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10 (separate
        bounds); Ye et al. 2020, arXiv 1912.09729, eq. 5 and Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291
        (delta)
    """
    lowest, highest = params.log_bounds
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    is_negative = advantages < 0
    # Where A < 0 the minimum is max(r', 1 - epsilon) * A, else min(r, 1 + epsilon_high) * A.
    lower = torch.full_like(log_ratio, -math.inf).masked_fill(is_negative, lowest)
    upper = torch.full_like(log_ratio, highest).masked_fill(
        is_negative, math.log(params.delta) if params.delta else math.inf
    )
    loss = -_clip(log_ratio, lower, upper).exp() * advantages
    return TokenLoss(loss, _clip_stats(log_ratio, advantages, lowest, highest))


def cispo(tokens: PolicyTokens, params: BoundParams) -> TokenLoss:
    """REINFORCE with a clipped weight: -sg[clip(r, 1 - epsilon, 1 + epsilon_high)] A log pi.

    No token loses its gradient. As always, the bounds are relative to 1. In TRL the bound is epsilon_high itself,
    so its default scales every gradient by 0.2, and TRL's 5.0 is 4.0 here.

    Args:
        tokens: The tokens.
        params: The bounds.

    Returns:
        loss [N], and `cispo_clip_ratio`: 1 where the ratio is outside the bounds and A is not 0 (TRL counts ratios
        above the bound where A > 0).

    Source: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, section 3.1
    """
    lowest, highest = params.log_bounds
    log_ratio = tokens.log_ratio.detach()
    is_clipped = ((log_ratio < lowest) | (log_ratio > highest)) & (tokens.advantages != 0)
    weights = log_ratio.clamp(lowest, highest).exp()
    return TokenLoss(_weighted_nll(tokens, weights), {"cispo_clip_ratio": is_clipped.float()})


def aipo(tokens: PolicyTokens, params: AipoParams) -> TokenLoss:
    """REINFORCE with a weight that is bounded above: -sg[min(r, rho)] A log pi.

    `old` is the sampling policy. In cosmos-rl the gradient flows through min(r, rho) instead, so tokens above the
    bound have no gradient; here, as in the paper, their gradient keeps the weight rho.

    Args:
        tokens: The tokens.
        params: The bound.

    Returns:
        loss [N], and `aipo_clip_ratio`: 1 where the ratio is above rho and A is not 0.

    Source: Wu et al. 2025 (LlamaRL), arXiv 2505.24034
    """
    highest = math.log(params.rho)
    log_ratio = tokens.log_ratio.detach()
    weights = log_ratio.clamp(max=highest).exp()
    is_clipped = (log_ratio > highest) & (tokens.advantages != 0)
    return TokenLoss(_weighted_nll(tokens, weights), {"aipo_clip_ratio": is_clipped.float()})


def dppo(tokens: PolicyTokens, params: DppoParams) -> TokenLoss:
    """REINFORCE that masks tokens whose probability has moved too far: -m sg[min(r, delta)] A log pi.

    m = 0 where pi - old > epsilon_high and A > 0, or old - pi > epsilon and A < 0; else 1. |pi - old| is the total
    variation of the binary distribution "this token or another". Rare tokens may therefore change by a large factor,
    likely ones only by a small one.

    Args:
        tokens: The tokens.
        params: How far a probability may fall and rise, and the largest ratio.

    Returns:
        loss [N], and 0/1 indicators of masked tokens: `clip_ratio/low`, `clip_ratio/high`, `clip_ratio/region`.

    Source: Qi et al. 2026 (DPPO), arXiv 2602.04879 (binary total variation)
    """
    rise = tokens.trainable_logprobs.detach().exp() - tokens.old_logprobs.where(tokens.trainable, 0.0).exp()
    stats = _clip_stats(rise, tokens.advantages, -params.epsilon, params.high)
    highest = MAX_LOG_RATIO if params.delta is None else math.log(params.delta)
    weights = tokens.log_ratio.detach().clamp(max=highest).exp() * (1 - stats["clip_ratio/region"])
    return TokenLoss(_weighted_nll(tokens, weights), stats)


def reinforce(tokens: PolicyTokens, _: PolicyLossParams) -> TokenLoss:
    """The plain policy gradient: -A log pi. There is no ratio, so it is exact only for on-policy samples.

    Args:
        tokens: The tokens; `old_logprobs` are not read.

    Returns:
        loss [N], no statistics.

    Source: Williams 1992, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning
    """
    return TokenLoss(_weighted_nll(tokens, torch.ones_like(tokens.advantages)), {})


def sapo(tokens: PolicyTokens, params: SapoParams) -> TokenLoss:
    """A soft gate in place of a clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    The gradient is that of -r A times 4 p (1 - p) with p = sigmoid(tau (r - 1)). This factor is 1 at r = 1 and falls
    on both sides, faster for a higher tau.

    Args:
        tokens: The tokens.
        params: The temperatures tau.

    Returns:
        loss [N], no statistics.

    Source: Gao et al. 2025 (SAPO), arXiv 2511.20347
    """
    log_ratio = tokens.log_ratio
    tau = torch.full_like(log_ratio, params.temperature_neg)
    tau = tau.masked_fill(tokens.advantages > 0, params.temperature_pos)
    gate = torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)))
    return TokenLoss(-4 / tau * gate * tokens.advantages, {})


def gmpo(tokens: PolicyTokens, params: GmpoParams) -> TokenLoss:
    """Geometric mean of a row's clipped ratios: -A R. With d = log r of a token, the row's R is

        R = exp(mean_t sgn(A) min(sgn(A) d, sgn(A) clip(d, -epsilon, epsilon_high)))

    Every token of the row gets the same R, so the reduction `sequence_mean` counts it once.

    Args:
        tokens: The tokens, at level `token`: the mean is taken here.
        params: Bounds of d: the ratio is clipped to exp(-epsilon) .. exp(epsilon_high).

    Returns:
        loss [N], and the 0/1 indicators of `clipped_surrogate`, here for d.

    Source: Zhao et al. 2025 (GMPO), arXiv 2507.20673
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    sign = advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * _clip(log_ratio, -params.epsilon, params.high))
    ratios = tokens.row_means(clipped).clamp(max=MAX_LOG_RATIO).exp()
    stats = _clip_stats(log_ratio, advantages, -params.epsilon, params.high)
    return TokenLoss(-ratios[tokens.row_index] * advantages, stats)


def vespo(tokens: PolicyTokens, params: VespoParams) -> TokenLoss:
    """REINFORCE with a smooth sequence-level weight: -sg[phi(W)] A log pi, with W = pi / old of the row and

        phi(W) = exp(lambda + k log W - lambda W) = W^k exp(lambda (1 - W))

    phi(1) = 1, and its maximum is at W = k / lambda.

    Args:
        tokens: The tokens, at level `token`: the sum is taken here. `old` is the sampling policy.
        params: k and lambda.

    Returns:
        loss [N], and `vespo/phi_seq_mean`: phi. TRL's mean is over rows.

    Source: Shen et al. 2026 (VESPO), arXiv 2602.10693
    """
    log_weight = replace(tokens, level="sequence_sum").log_ratio.detach()
    is_negative = tokens.advantages < 0
    k = torch.full_like(log_weight, params.k_pos).masked_fill(is_negative, params.k_neg)
    lam = torch.full_like(log_weight, params.lambda_pos).masked_fill(is_negative, params.lambda_neg)
    phi = (k * log_weight - lam * torch.expm1(log_weight)).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(_weighted_nll(tokens, phi), {"vespo/phi_seq_mean": phi})


def clip_cov(tokens: PolicyTokens, params: ClipCovParams) -> TokenLoss:
    """`clipped_surrogate`, with loss 0 for those of `cov_tokens` that it does not clip.

    Args:
        tokens: The tokens, with `cov_tokens`: see `covariance.select_clip_cov`.
        params: The bounds, as in `clipped_surrogate`.

    Returns:
        loss [N], the indicators of `clipped_surrogate`, and `clip_cov/selected`: 1 where the loss is dropped.

    Raises:
        ValueError: There is no selection.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (Clip-Cov)
    """
    surrogate = clipped_surrogate(tokens, params)
    is_dropped = _cov_tokens(tokens) & (surrogate.stats["clip_ratio/region"] == 0)
    loss = surrogate.loss.masked_fill(is_dropped, 0.0)
    return TokenLoss(loss, surrogate.stats | {"clip_cov/selected": is_dropped.float()})


def kl_cov(tokens: PolicyTokens, params: KlCovParams) -> TokenLoss:
    """The unclipped surrogate -r A, plus a penalty on selected tokens: -r A + coef |log r|.

    Args:
        tokens: The tokens, with `cov_tokens`: see `covariance.select_kl_cov`.
        params: The weight of the penalty.

    Returns:
        loss [N], and `kl_cov/selected`: 1 where the penalty is added.

    Raises:
        ValueError: There is no selection.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (KL-Cov)
    """
    log_ratio, is_selected = tokens.log_ratio, _cov_tokens(tokens)
    surrogate = -log_ratio.clamp(max=MAX_LOG_RATIO).exp() * tokens.advantages
    penalty = (params.coef * log_ratio.abs()).where(is_selected, 0.0)
    return TokenLoss(surrogate + penalty, {"kl_cov/selected": is_selected.float()})


def _clip(log_ratio: Tensor, lower: Tensor | float, upper: Tensor | float) -> Tensor:
    """`log_ratio.clamp(lower, upper)` with the gradient 1 on the bounds, where that of torch is 0 from 2.14 on."""
    is_inside = (log_ratio >= lower) & (log_ratio <= upper)
    return log_ratio.where(is_inside, log_ratio.detach().clamp(lower, upper))  # type: ignore[arg-type]


def _clip_stats(log_ratio: Tensor, advantages: Tensor, lowest: float, highest: float) -> dict[str, Tensor]:
    """0/1 indicators of where a log-ratio, or a quantity used in its place, is outside the bound that limits it."""
    is_low = (log_ratio < lowest) & (advantages < 0)
    is_high = (log_ratio > highest) & (advantages > 0)
    stats = {"clip_ratio/low": is_low, "clip_ratio/high": is_high, "clip_ratio/region": is_low | is_high}
    return {name: indicator.float() for name, indicator in stats.items()}


def _weighted_nll(tokens: PolicyTokens, weights: Tensor) -> Tensor:
    """-weights A log pi."""
    return -(weights * tokens.advantages) * tokens.trainable_logprobs


def _cov_tokens(tokens: PolicyTokens) -> Tensor:
    if tokens.cov_tokens is None:
        raise ValueError("cov_tokens=None: clip_cov and kl_cov need the selection of the generation batch")
    return tokens.cov_tokens


P = TypeVar("P", bound=PolicyLossParams)


@dataclass(frozen=True, slots=True)
class PolicyLoss(Generic[P]):
    """A row of `POLICY_LOSSES`: `function(tokens, params)`, then `reduction`; see `PolicyLossFacts`."""

    function: Callable[[PolicyTokens, P], TokenLoss]
    params: type[P]
    reduction: Reduction
    source: str
    levels: tuple[ImportanceLevel, ...]
    # `selection(covariances, trainable, keys, params)`, called once per generation batch, if set.
    selection: Callable[[Tensor, Tensor, Tensor, P], Tensor] | None = None


# Statistics that depend on the ratio even where A = 0. All others are known there without it.
NEEDS_RATIO = frozenset({"vespo/phi_seq_mean"})

_FUNCTIONS: dict[LossType, Callable[[PolicyTokens, Any], TokenLoss]] = {
    "grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "luspo": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": reinforce,
    "reinforce": reinforce,
    "aipo": aipo,
    "dppo": dppo,
    "vespo": vespo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
_SELECTIONS: dict[LossType, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "clip_cov": select_clip_cov,
    "kl_cov": select_kl_cov,
}

POLICY_LOSSES: dict[LossType, PolicyLoss[Any]] = {
    name: PolicyLoss(function, **vars(POLICY_LOSS_FACTS[name]), selection=_SELECTIONS.get(name))
    for name, function in _FUNCTIONS.items()
}
