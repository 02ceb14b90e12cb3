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
from typing import TYPE_CHECKING

import torch

from prefrl.losses.policy.covariance import select_clip_cov, select_kl_cov
from prefrl.losses.policy.tokens import MAX_LOG_RATIO, ImportanceLevel, PolicyTokens, TokenLoss
from prefrl.losses.table import keyword_names

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.losses.reduce import Reduction

__all__ = [
    "ImportanceLevel",
    "NEEDS_RATIO",
    "POLICY_LOSSES",
    "PolicyLoss",
    "PolicyTokens",
    "TokenLoss",
    "aipo",
    "cispo",
    "clip_cov",
    "clipped_surrogate",
    "dppo",
    "gmpo",
    "kl_cov",
    "reinforce",
    "sapo",
    "vespo",
]


def clipped_surrogate(tokens: PolicyTokens, *, epsilon: float, epsilon_high: float, delta: float | None) -> TokenLoss:
    """PPO's surrogate with separate bounds: -min(r' A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r' = min(r, delta).

    The clip limits only the side that the advantage favors. `delta` limits large ratios where A < 0, for which the
    plain surrogate has no bound. This is the dual clip; where A < 0,

        -min(r' A, clip(r) A) = min(max(-r A, -clip(r) A), -delta A)

    Args:
        tokens: The tokens.
        epsilon: The ratio is clipped to >= 1 - epsilon; in 0 .. 1.
        epsilon_high: The ratio is clipped to <= 1 + epsilon_high.
        delta: Largest ratio where A < 0, above 1 + epsilon_high; None: no bound. `clip_ratio_c` in verl,
            `lower_bound_ratio` in cosmos-rl.

    Returns:
        loss [N], and 0/1 indicators of ratios outside the clip range, on the side that the clip limits:
        `clip_ratio/low` (r < 1 - epsilon and A < 0), `clip_ratio/high` (r > 1 + epsilon_high and A > 0) and
        `clip_ratio/region` (either).

    Raises:
        ValueError: The bounds contradict each other.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10 (separate
        bounds); Ye et al. 2020, arXiv 1912.09729, eq. 5 and Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291
        (delta)
    """
    lowest, highest = _log_bounds(epsilon, epsilon_high)
    if delta is not None and delta <= 1 + epsilon_high:
        raise ValueError(f"delta={delta}: needs to be above 1 + epsilon_high = {1 + epsilon_high}")
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    is_negative = advantages < 0
    # Where A < 0 the minimum is max(r', 1 - epsilon) * A, else min(r, 1 + epsilon_high) * A.
    lower = torch.full_like(log_ratio, -math.inf).masked_fill(is_negative, lowest)
    upper = torch.full_like(log_ratio, highest).masked_fill(is_negative, math.log(delta) if delta else math.inf)
    loss = -log_ratio.clamp(lower, upper).exp() * advantages
    return TokenLoss(loss, _clip_stats(log_ratio, advantages, lowest, highest))


def cispo(tokens: PolicyTokens, *, epsilon: float, epsilon_high: float) -> TokenLoss:
    """REINFORCE with a clipped weight: -sg[clip(r, 1 - epsilon, 1 + epsilon_high)] A log pi.

    No token loses its gradient. As everywhere, the bounds are relative to 1. In TRL the bound is epsilon_high itself,
    so its default scales every gradient by 0.2, and TRL's 5.0 is 4.0 here. epsilon=1 means no lower bound.

    Args:
        tokens: The tokens.
        epsilon: The ratio is clipped to >= 1 - epsilon; in 0 .. 1.
        epsilon_high: The ratio is clipped to <= 1 + epsilon_high.

    Returns:
        loss [N], and `cispo_clip_ratio`: 1 where the ratio is outside the bounds and A is not 0 (TRL counts ratios
        above the bound where A > 0).

    Raises:
        ValueError: The bounds contradict each other.

    Source: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, section 3.1
    """
    lowest, highest = _log_bounds(epsilon, epsilon_high)
    log_ratio = tokens.log_ratio.detach()
    is_clipped = ((log_ratio < lowest) | (log_ratio > highest)) & (tokens.advantages != 0)
    weights = log_ratio.clamp(lowest, highest).exp()
    return TokenLoss(_weighted_nll(tokens, weights), {"cispo_clip_ratio": is_clipped.float()})


def aipo(tokens: PolicyTokens, *, aipo_rho: float) -> TokenLoss:
    """REINFORCE with a weight that is bounded above: -sg[min(r, aipo_rho)] A log pi.

    `old` is the sampling policy. In cosmos-rl the gradient flows through min(r, aipo_rho) instead, so tokens above the
    bound have no gradient; here, as in the paper, their gradient keeps the weight aipo_rho.

    Args:
        tokens: The tokens.
        aipo_rho: Largest ratio, at least 1; the paper recommends 2 .. 10.

    Returns:
        loss [N], and `aipo_clip_ratio`: 1 where the ratio is above aipo_rho and A is not 0.

    Raises:
        ValueError: aipo_rho < 1, which would scale down even the gradient of on-policy samples.

    Source: Wu et al. 2025 (LlamaRL), arXiv 2505.24034
    """
    if not 1 <= aipo_rho < math.inf:
        raise ValueError(f"aipo_rho={aipo_rho}: the largest ratio, needs to be finite and >= 1")
    highest = math.log(aipo_rho)
    log_ratio = tokens.log_ratio.detach()
    weights = log_ratio.clamp(max=highest).exp()
    is_clipped = (log_ratio > highest) & (tokens.advantages != 0)
    return TokenLoss(_weighted_nll(tokens, weights), {"aipo_clip_ratio": is_clipped.float()})


def dppo(tokens: PolicyTokens, *, epsilon: float, epsilon_high: float, delta: float | None) -> TokenLoss:
    """REINFORCE that masks tokens whose probability has moved too far: -m sg[min(r, delta)] A log pi.

    m = 0 where pi - old > epsilon_high and A > 0, or old - pi > epsilon and A < 0; else 1. |pi - old| is the total
    variation of the binary distribution "this token or another". Rare tokens may therefore change by a large factor,
    likely ones only by a small one.

    Args:
        tokens: The tokens.
        epsilon: How far a probability may fall; in 0 .. 1.
        epsilon_high: How far it may rise.
        delta: Largest ratio, which bounds the weight of rare tokens; None: no bound. `clip_ratio_c` in verl.

    Returns:
        loss [N], and 0/1 indicators of masked tokens: `clip_ratio/low`, `clip_ratio/high`, `clip_ratio/region`.

    Raises:
        ValueError: A bound is out of range.

    Source: Qi et al. 2026 (DPPO), arXiv 2602.04879 (binary total variation)
    """
    _log_bounds(epsilon, epsilon_high)
    if delta is not None:
        _check_positive(delta=delta)
    rise = tokens.trainable_logprobs.detach().exp() - tokens.old_logprobs.where(tokens.trainable, 0.0).exp()
    stats = _clip_stats(rise, tokens.advantages, -epsilon, epsilon_high)
    highest = MAX_LOG_RATIO if delta is None else math.log(delta)
    weights = tokens.log_ratio.detach().clamp(max=highest).exp() * (1 - stats["clip_ratio/region"])
    return TokenLoss(_weighted_nll(tokens, weights), stats)


def reinforce(tokens: PolicyTokens) -> TokenLoss:
    """The plain policy gradient: -A log pi. There is no ratio, so it is exact only for on-policy samples.

    Args:
        tokens: The tokens; `old_logprobs` are not read.

    Returns:
        loss [N], no statistics.

    Source: Williams 1992, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning
    """
    return TokenLoss(_weighted_nll(tokens, torch.ones_like(tokens.advantages)), {})


def sapo(tokens: PolicyTokens, *, sapo_temperature_pos: float, sapo_temperature_neg: float) -> TokenLoss:
    """A soft gate in place of a clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    The gradient is that of -r A times 4 p (1 - p) with p = sigmoid(tau (r - 1)). This factor is 1 at r = 1 and falls
    on both sides, faster for a higher tau.

    Args:
        tokens: The tokens.
        sapo_temperature_pos: tau where A > 0, above 0.
        sapo_temperature_neg: tau where A <= 0, above 0.

    Returns:
        loss [N], no statistics.

    Raises:
        ValueError: A temperature is not positive.

    Source: Gao et al. 2025 (SAPO), arXiv 2511.20347
    """
    _check_positive(sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    log_ratio = tokens.log_ratio
    tau = torch.full_like(log_ratio, sapo_temperature_neg)
    tau = tau.masked_fill(tokens.advantages > 0, sapo_temperature_pos)
    gate = torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)))
    return TokenLoss(-4 / tau * gate * tokens.advantages, {})


def gmpo(tokens: PolicyTokens, *, epsilon: float, epsilon_high: float) -> TokenLoss:
    """Geometric mean of a row's clipped ratios: -A R. With d = log r of a token, the row's R is

        R = exp(mean_t sgn(A) min(sgn(A) d, sgn(A) clip(d, -epsilon, epsilon_high)))

    Every token of the row gets the same R, so the reduction `sequence_mean` counts it once.

    Args:
        tokens: The tokens, at level `token`: the mean is taken here.
        epsilon: Nats: the ratio is clipped to >= exp(-epsilon). The paper uses 0.4 for both.
        epsilon_high: Nats: the ratio is clipped to <= exp(epsilon_high).

    Returns:
        loss [N], and the 0/1 indicators of `clipped_surrogate`, here for d.

    Raises:
        ValueError: A bound is negative.

    Source: Zhao et al. 2025 (GMPO), arXiv 2507.20673
    """
    if epsilon < 0 or epsilon_high < 0:
        raise ValueError(f"epsilon={epsilon}, epsilon_high={epsilon_high}: need to be >= 0")
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    sign = advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-epsilon, epsilon_high))
    ratios = tokens.row_means(clipped).clamp(max=MAX_LOG_RATIO).exp()
    stats = _clip_stats(log_ratio, advantages, -epsilon, epsilon_high)
    return TokenLoss(-ratios[tokens.row_index] * advantages, stats)


def vespo(
    tokens: PolicyTokens,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> TokenLoss:
    """REINFORCE with a smooth sequence-level weight: -sg[phi(W)] A log pi, with W = pi / old of the row and

        phi(W) = exp(lambda + k log W - lambda W) = W^k exp(lambda (1 - W))

    phi(1) = 1, and its maximum is at W = k / lambda.

    Args:
        tokens: The tokens, at level `token`: the sum is taken here. `old` is the sampling policy.
        vespo_k_pos: k where A >= 0, not negative: how fast rows with W < 1 lose weight.
        vespo_lambda_pos: lambda where A >= 0, above 0: how fast rows with W > 1 lose weight.
        vespo_k_neg: k where A < 0.
        vespo_lambda_neg: lambda where A < 0.

    Returns:
        loss [N], and `vespo/phi_seq_mean`: phi. TRL's mean is over rows.

    Raises:
        ValueError: k < 0 or lambda <= 0, which would make phi unbounded.

    Source: Shen et al. 2026 (VESPO), arXiv 2602.10693
    """
    _check_positive(vespo_lambda_pos=vespo_lambda_pos, vespo_lambda_neg=vespo_lambda_neg)
    if vespo_k_pos < 0 or vespo_k_neg < 0:
        raise ValueError(f"vespo_k_pos={vespo_k_pos}, vespo_k_neg={vespo_k_neg}: need to be >= 0")
    log_weight = replace(tokens, level="sequence_sum").log_ratio.detach()
    is_negative = tokens.advantages < 0
    k = torch.full_like(log_weight, vespo_k_pos).masked_fill(is_negative, vespo_k_neg)
    lam = torch.full_like(log_weight, vespo_lambda_pos).masked_fill(is_negative, vespo_lambda_neg)
    phi = (k * log_weight - lam * torch.expm1(log_weight)).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(_weighted_nll(tokens, phi), {"vespo/phi_seq_mean": phi})


def clip_cov(tokens: PolicyTokens, *, epsilon: float, epsilon_high: float, delta: float | None) -> TokenLoss:
    """`clipped_surrogate`, with loss 0 for those of `cov_tokens` that it does not clip.

    Args:
        tokens: The tokens, with `cov_tokens`: see `covariance.select_clip_cov`.
        epsilon: As in `clipped_surrogate`.
        epsilon_high: As in `clipped_surrogate`.
        delta: As in `clipped_surrogate`.

    Returns:
        loss [N], the indicators of `clipped_surrogate`, and `clip_cov/selected`: 1 where the loss is dropped.

    Raises:
        ValueError: The bounds contradict each other, or there is no selection.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (Clip-Cov)
    """
    surrogate = clipped_surrogate(tokens, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)
    is_dropped = _cov_tokens(tokens) & (surrogate.stats["clip_ratio/region"] == 0)
    loss = surrogate.loss.masked_fill(is_dropped, 0.0)
    return TokenLoss(loss, surrogate.stats | {"clip_cov/selected": is_dropped.float()})


def kl_cov(tokens: PolicyTokens, *, kl_cov_coef: float) -> TokenLoss:
    """The unclipped surrogate -r A, plus a penalty on selected tokens: -r A + kl_cov_coef |log r|.

    Args:
        tokens: The tokens, with `cov_tokens`: see `covariance.select_kl_cov`.
        kl_cov_coef: Not negative; `ppo_kl_coef` in verl.

    Returns:
        loss [N], and `kl_cov/selected`: 1 where the penalty is added.

    Raises:
        ValueError: The coefficient is negative, or there is no selection.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2 (KL-Cov)
    """
    if kl_cov_coef < 0:
        raise ValueError(f"kl_cov_coef={kl_cov_coef}: needs to be >= 0")
    log_ratio, is_selected = tokens.log_ratio, _cov_tokens(tokens)
    surrogate = -log_ratio.clamp(max=MAX_LOG_RATIO).exp() * tokens.advantages
    penalty = (kl_cov_coef * log_ratio.abs()).where(is_selected, 0.0)
    return TokenLoss(surrogate + penalty, {"kl_cov/selected": is_selected.float()})


def _log_bounds(epsilon: float, epsilon_high: float) -> tuple[float, float]:
    """Logarithms of 1 - epsilon and 1 + epsilon_high."""
    if not 0 <= epsilon <= 1 or epsilon_high < 0:
        raise ValueError(f"epsilon={epsilon}, epsilon_high={epsilon_high}: need 0 <= epsilon <= 1, epsilon_high >= 0")
    return math.log1p(-epsilon) if epsilon < 1 else -math.inf, math.log1p(epsilon_high)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: needs to be > 0")


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


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A row of `POLICY_LOSSES`: `function(tokens, **hyperparameters)`, then `reduction`."""

    function: Callable[..., TokenLoss]
    reduction: Reduction
    source: str
    # Allowed values of `PolicyTokens.level`. Losses that compute a row ratio themselves, or use none, have `token`.
    levels: tuple[ImportanceLevel, ...]
    # `selection(covariances, trainable, keys, **hyperparameters)`, called once per generation batch, if there is one.
    selection: Callable[..., Tensor] | None = None

    @property
    def hyperparameters(self) -> frozenset[str]:
        """Names of the keyword arguments that the function needs."""
        return keyword_names(self.function)

    @property
    def selection_hyperparameters(self) -> frozenset[str]:
        """Names of the keyword arguments that the selection needs."""
        return keyword_names(self.selection) if self.selection is not None else frozenset()


_COV = "Cui et al. 2025, arXiv 2505.22617, section 4.2"
_TOKEN: tuple[ImportanceLevel, ...] = ("token",)
# A row's ratio must enter once per row. With a mean over all tokens, long rows would count twice.
_NOT_SUM: tuple[ImportanceLevel, ...] = ("token", "sequence", "sequence_token")
_ANY: tuple[ImportanceLevel, ...] = (*_NOT_SUM, "sequence_sum")
# If the ratio is a constant weight, sequence and sequence_token are the same.
_WEIGHT: tuple[ImportanceLevel, ...] = ("token", "sequence", "sequence_sum")

# Stats that depend on the ratio also where A = 0. All others are known there without it.
NEEDS_RATIO = frozenset({"vespo/phi_seq_mean"})

# Counts span the whole optimizer step on all ranks. So bnpo, a token mean over one micro-batch in TRL, is the same as
# dapo here; configurations carry both names. GSPO is grpo at level sequence or sequence_token.
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped_surrogate, "sequence_mean", "Shao et al. 2024, arXiv 2402.03300, eq. 3", _ANY),
    "bnpo": PolicyLoss(clipped_surrogate, "token", "TRL, GRPOConfig.loss_type", _NOT_SUM),
    "dr_grpo": PolicyLoss(clipped_surrogate, "constant", "Liu et al. 2025, arXiv 2503.20783, section 3.2", _NOT_SUM),
    "dapo": PolicyLoss(clipped_surrogate, "token", "Yu et al. 2025, arXiv 2503.14476, eq. 12", _NOT_SUM),
    "luspo": PolicyLoss(
        clipped_surrogate, "sequence_sum", "LUSPO 2026, arXiv 2602.05261", ("sequence", "sequence_token")
    ),
    "cispo": PolicyLoss(cispo, "token", "MiniMax 2025, arXiv 2506.13585, section 3.1", _WEIGHT),
    "sapo": PolicyLoss(sapo, "sequence_mean", "Gao et al. 2025, arXiv 2511.20347", _ANY),
    "gmpo": PolicyLoss(gmpo, "sequence_mean", "Zhao et al. 2025, arXiv 2507.20673", _TOKEN),
    "gpg": PolicyLoss(reinforce, "token", "Chu et al. 2025, arXiv 2504.02546", _TOKEN),
    "reinforce": PolicyLoss(reinforce, "sequence_sum", "Williams 1992", _TOKEN),
    "aipo": PolicyLoss(aipo, "token", "Wu et al. 2025, arXiv 2505.24034", _WEIGHT),
    "dppo": PolicyLoss(dppo, "token", "Qi et al. 2026, arXiv 2602.04879", _TOKEN),
    "vespo": PolicyLoss(vespo, "token", "Shen et al. 2026, arXiv 2602.10693", _TOKEN),
    "clip_cov": PolicyLoss(clip_cov, "token", _COV, ("token", "sequence_token"), select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, "token", _COV, _TOKEN, select_kl_cov),
}
