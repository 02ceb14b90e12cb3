"""Pairwise preference losses, for a chosen and a rejected response to one prompt, and their tables.

Symbols of the formulas, for each of P pairs:

    u_w, u_l  log-ratio of the chosen (winning) and the rejected (losing) response: log pi(y | x) - log ref(y | x)
    s_w, s_l  their scores: f'(pi / ref) of an f-divergence, which is u for the reverse KL divergence
    m         s_w - s_l
    b         beta > 0, in 1 / nats; b * u is the implicit reward
    e         label_smoothing, the probability that a label is wrong
    |y_w|     tokens of the chosen response that have a loss
    a_w, a_l  log-probs of the responses, as means over their tokens; g is simpo_gamma

Every loss takes `Pairs` and its hyperparameters, and returns [P]. Both check their values when they are constructed.
Losses without a reference model, those of CPO, take `Pairs` whose reference log-probs are 0, as if all responses were
equally likely under it: three of them are DPO's. The caller adds CPO's negative log-likelihood of the chosen response.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from prefrl.losses.per_token import check_same_shape
from prefrl.options.preference import (
    CPO_LOSS_FACTS,
    PAIR_LOSS_FACTS,
    AlphaParams,
    DiscopopParams,
    Divergence,
    ExoParams,
    PairParams,
    RobustParams,
    SimpoParams,
    SmoothedParams,
)

# exp(40) and its square, which IPO needs, are finite in float32.
_LARGEST_EXPONENT = 40.0
# Below this power, a Box-Cox transform equals the logarithm to within rounding.
_SMALLEST_POWER = 1e-6


def box_cox(log_value: Tensor, *, power: float) -> Tensor:
    """Box-Cox transform of exp(log_value): (exp(power * log_value) - 1) / power, or log_value if the power is 0.

    The exponent is clamped to at most 40. Above that the result is constant and has no gradient.

    Args:
        log_value: Any shape, nats, gradient flows.
        power: Any sign.

    Returns:
        The shape of `log_value`.
    """
    if abs(power) < _SMALLEST_POWER:
        return log_value
    return torch.expm1((power * log_value).clamp(max=_LARGEST_EXPONENT)) / power


def divergence_score(log_ratio: Tensor, *, divergence: Divergence, alpha: float) -> Tensor:
    """f'(pi / ref) of an f-divergence: the implicit reward, up to b and a constant, under that regularization.

    | divergence | f'(exp(u)) |
    |---|---|
    | reverse_kl | u |
    | forward_kl | 1 - exp(-u) |
    | js_divergence | log 2 + log sigmoid(u) |
    | alpha_divergence | (exp((alpha - 1) u) - 1) / (alpha - 1) |

    Each is 0 at u = 0 and increasing. alpha = 1 is the reverse and alpha = 0 the forward KL divergence; `alpha` is 1
    minus the paper's alpha.

    Args:
        log_ratio: u, any shape, nats, gradient flows.
        divergence: See above.
        alpha: Used by `alpha_divergence` only.

    Returns:
        The shape of `log_ratio`; exponents are clamped as in `box_cox`.

    Source: Wang et al. 2023, arXiv 2309.16240, table of f-divergences
    """
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    powers = {"reverse_kl": 0.0, "forward_kl": -1.0, "alpha_divergence": alpha - 1}
    return box_cox(log_ratio, power=powers[divergence])


def smoothed_logistic(margin: Tensor, *, label_smoothing: float) -> Tensor:
    """Cross-entropy with label smoothing: -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).

    Args:
        margin: [P], reward difference, gradient flows.
        label_smoothing: e, in 0 .. 0.5.

    Returns:
        [P] nats.

    Source: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf
    """
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log-probs of P pairs under the policy and the reference, and how losses compare them."""

    chosen_logps: Tensor  # [P] nats, summed over tokens, gradient flows
    rejected_logps: Tensor  # [P]
    ref_chosen_logps: Tensor  # [P] nats, treated as constant
    ref_rejected_logps: Tensor  # [P]
    chosen_lengths: Tensor  # [P] float32, tokens with a loss, >= 1
    rejected_lengths: Tensor  # [P]
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5
    reward_shift: float | Tensor = 0.0  # t, [], running mean of the rewards b u of chosen and rejected responses

    def __post_init__(self) -> None:
        check_same_shape(
            chosen_logps=self.chosen_logps,
            rejected_logps=self.rejected_logps,
            ref_chosen_logps=self.ref_chosen_logps,
            ref_rejected_logps=self.ref_rejected_logps,
            chosen_lengths=self.chosen_lengths,
            rejected_lengths=self.rejected_lengths,
        )

    @property
    def chosen_log_ratio(self) -> Tensor:
        """u_w, [P] nats."""
        return self.chosen_logps - self.ref_chosen_logps.detach()

    @property
    def rejected_log_ratio(self) -> Tensor:
        """u_l, [P] nats."""
        return self.rejected_logps - self.ref_rejected_logps.detach()

    @property
    def chosen_score(self) -> Tensor:
        """s_w, [P]."""
        return divergence_score(self.chosen_log_ratio, divergence=self.divergence, alpha=self.alpha)

    @property
    def rejected_score(self) -> Tensor:
        """s_l, [P]."""
        return divergence_score(self.rejected_log_ratio, divergence=self.divergence, alpha=self.alpha)

    @property
    def score_margin(self) -> Tensor:
        """The score margin m = s_w - s_l that most losses are a function of, [P]."""
        return self.chosen_score - self.rejected_score

    @property
    def mean_score_margin(self) -> Tensor:
        """The margin per token, s_w / |y_w| - s_l / |y_l|, [P]."""
        return self.chosen_score / self.chosen_lengths - self.rejected_score / self.rejected_lengths


def sigmoid(pairs: Pairs, params: SmoothedParams) -> Tensor:
    """Direct preference optimization; conservative DPO where e > 0.

        -(1 - e) log sigmoid(b m) - e log sigmoid(-b m)

    Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; Mitchell 2023, https://ericmitchell.ai/cdpo.pdf
    """
    return smoothed_logistic(params.beta * pairs.score_margin, label_smoothing=params.label_smoothing)


def hinge(pairs: Pairs, params: PairParams) -> Tensor:
    """SLiC's hinge loss on the margin of log-ratios: max(0, 1 - b m).

    Source: Zhao et al. 2023 (SLiC-HF), arXiv 2305.10425, section 2; Liu et al. 2023 (RSO), arXiv 2309.06657 (ratios)
    """
    return torch.relu(1 - params.beta * pairs.score_margin)


def ipo(pairs: Pairs, params: PairParams) -> Tensor:
    """Identity preference optimization on per-token means: (s_w / |y_w| - s_l / |y_l| - 1 / (2 b))^2, b is tau there.

    The paper uses sums over tokens, which grow with the length of the responses while the target 1 / (2 b) is fixed.

    Source: Azar et al. 2023, arXiv 2310.12036, eq. 17
    """
    return (pairs.mean_score_margin - 1 / (2 * params.beta)).square()


def exo_pair(pairs: Pairs, params: ExoParams) -> Tensor:
    """Reverse KL divergence from the policy's preference to the smoothed label: KL([p, 1 - p] || [1 - e, e]).

    p = sigmoid(b m). The minimum, 0, is at b m = log((1 - e) / e), so e determines how far the margin is pushed. It
    is `smoothing`.

    Source: Ji et al. 2024, arXiv 2402.00856, eq. 16
    """
    margin = params.beta * pairs.score_margin
    if_chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-params.smoothing))
    if_rejected = torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(params.smoothing))
    return if_chosen + if_rejected


def nca_pair(pairs: Pairs, params: PairParams) -> Tensor:
    """Noise contrastive alignment: -log sigmoid(b u_w) - (log sigmoid(-b u_w) + log sigmoid(-b u_l)) / 2.

    Source: Chen et al. 2024, arXiv 2402.05369, section 4.1
    """
    chosen, rejected = params.beta * pairs.chosen_log_ratio, params.beta * pairs.rejected_log_ratio
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def robust(pairs: Pairs, params: RobustParams) -> Tensor:
    """Unbiased estimate of DPO's loss from labels that are wrong with probability e.

        (-(1 - e) log sigmoid(b m) + e log sigmoid(-b m)) / (1 - 2 e)

    It is not bounded below.

    Source: Chowdhury et al. 2024, arXiv 2403.00409, section 3.1
    """
    margin = params.beta * pairs.score_margin
    kept = -(1 - params.label_smoothing) * logsigmoid(margin)
    flipped = -params.label_smoothing * logsigmoid(-margin)
    return (kept - flipped) / (1 - 2 * params.label_smoothing)


def bco_pair(pairs: Pairs, params: PairParams) -> Tensor:
    """Binary classifier optimization on both responses: -log sigmoid(b u_w - t) - log sigmoid(t - b u_l).

    t is the `reward_shift` of the pairs.

    Source: Jung et al. 2024, arXiv 2404.04656, section 4
    """
    chosen = params.beta * pairs.chosen_log_ratio - pairs.reward_shift
    rejected = params.beta * pairs.rejected_log_ratio - pairs.reward_shift
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, params: PairParams) -> Tensor:
    """Self-play with hard win probabilities, 1 and 0: (u_w - 1 / (2 b))^2 + (u_l + 1 / (2 b))^2, b = 1 / eta.

    Source: Wu et al. 2024, arXiv 2405.00675, eq. 4.7
    """
    target = 1 / (2 * params.beta)
    return (pairs.chosen_log_ratio - target).square() + (pairs.rejected_log_ratio + target).square()


def aot(pairs: Pairs, params: SmoothedParams) -> Tensor:
    """Alignment via optimal transport, paired: push the policy's distribution of margins to dominate the reference's.

    d_i is the policy's i-th smallest margin log pi(y_w) - log pi(y_l) minus the reference's i-th smallest margin; the
    loss is `smoothed_logistic` of b d_i. Entry i belongs to the i-th position of the sorted margins, not to pair i.

    Source: Melnyk et al. 2024, arXiv 2406.05882, section 3 (paired)
    """
    margins = (pairs.chosen_logps - pairs.rejected_logps).sort().values
    ref_margins = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).detach().sort().values
    return smoothed_logistic(params.beta * (margins - ref_margins), label_smoothing=params.label_smoothing)


def aot_unpaired(pairs: Pairs, params: SmoothedParams) -> Tensor:
    """Alignment via optimal transport, unpaired: push the rewards of chosen responses to dominate the rejected ones'.

    d_i is the i-th smallest u_w minus the i-th smallest u_l; the loss is `smoothed_logistic` of b d_i. Entry i belongs
    to the i-th position of the sorted log-ratios, not to pair i.

    Source: Melnyk et al. 2024, arXiv 2406.05882, section 3 (unpaired)
    """
    chosen = pairs.chosen_log_ratio.sort().values
    rejected = pairs.rejected_log_ratio.sort().values
    return smoothed_logistic(params.beta * (chosen - rejected), label_smoothing=params.label_smoothing)


def apo_zero(pairs: Pairs, params: PairParams) -> Tensor:
    """Anchored preference optimization, APO-zero: 1 - sigmoid(b u_w) + sigmoid(b u_l).

    It raises the chosen and lowers the rejected response. Meant for chosen responses that are better than the model's.

    Source: D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7
    """
    return torch.sigmoid(-params.beta * pairs.chosen_log_ratio) + torch.sigmoid(params.beta * pairs.rejected_log_ratio)


def apo_down(pairs: Pairs, params: PairParams) -> Tensor:
    """Anchored preference optimization, APO-down: sigmoid(b u_w) + 1 - sigmoid(b (u_w - u_l)).

    It lowers both responses, the rejected one more. Meant for chosen responses that are worse than the model's.

    Source: D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8
    """
    beta, chosen = params.beta, pairs.chosen_log_ratio
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - pairs.rejected_log_ratio))


def discopop(pairs: Pairs, params: DiscopopParams) -> Tensor:
    """Log-ratio modulated loss: -(1 - g) log sigmoid(b m) + g exp(-b m) with g = sigmoid(b m / tau).

    Source: Lu et al. 2024, arXiv 2406.08414, eq. 5
    """
    margin, tau = params.beta * pairs.score_margin, params.discopop_tau
    logistic = -torch.sigmoid(-margin / tau) * logsigmoid(margin)
    # g exp(-b m) as one exponential: for negative margins g would be 0 and the other factor would overflow.
    return logistic + torch.exp(logsigmoid(margin / tau) - margin)


def sft(pairs: Pairs, _: PairParams) -> Tensor:
    """Negative log-likelihood of the chosen response: -log pi(y_w | x), a sum over its tokens.

    The caller divides the sum over all pairs of a step by the step's number of chosen tokens, not by its number of
    pairs, which gives a mean over tokens.
    """
    return -pairs.chosen_logps


def sigmoid_norm(pairs: Pairs, params: PairParams) -> Tensor:
    """Length-normalized DPO: -log sigmoid(b (s_w / |y_w| - s_l / |y_l|)).

    Source: Lambert et al. 2024 (Tulu 3), arXiv 2411.15124, section 5
    """
    return -logsigmoid(params.beta * pairs.mean_score_margin)


def rpo_nll(pairs: Pairs) -> Tensor:
    """The NLL term that RPO adds, per token of the chosen response: -log pi(y_w | x) / |y_w|.

    Args:
        pairs: P pairs.

    Returns:
        [P] nats.

    Source: Pang et al. 2024 (Iterative RPO), arXiv 2404.19733, section 2
    """
    return -pairs.chosen_logps / pairs.chosen_lengths


P = TypeVar("P", bound=PairParams)


@dataclass(frozen=True, slots=True)
class PairLoss(Generic[P]):
    """A row of `PAIR_LOSSES`: `function(pairs, params)` -> [P]; see `PairLossFacts`."""

    function: Callable[[Pairs, P], Tensor]
    params: type[P]
    source: str
    uses_log_ratios: bool
    is_batch_loss: bool


_FUNCTIONS: tuple[Callable[[Pairs, Any], Tensor], ...] = (
    *(sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down),
    *(discopop, sft, sigmoid_norm),
)

PAIR_LOSSES: dict[str, PairLoss[Any]] = {
    function.__name__: PairLoss(function, **vars(PAIR_LOSS_FACTS[function.__name__])) for function in _FUNCTIONS
}


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
    """Negative log-likelihood of the preference: -log sigmoid(chosen - rejected - margin).

    Args:
        chosen: [P] scores of the preferred responses of P pairs, gradient flows.
        rejected: [P] scores of the others, gradient flows.
        margin: [P], the lead of the chosen score at which the loss is ln 2, treated as constant; None: 0.

    Returns:
        [P] nats.

    Source: Touvron et al. 2023 (Llama 2), arXiv 2307.09288, eq. 1 and 2 (margin)
    """
    check_same_shape(chosen=chosen, rejected=rejected, margin=chosen if margin is None else margin)
    lead = chosen - rejected
    return -logsigmoid(lead if margin is None else lead - margin.detach())


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Squared sum of the two scores. It centers the scores at 0, since `bradley_terry` ignores a constant offset.

    Args:
        chosen: [P] scores of the preferred responses of P pairs, gradient flows.
        rejected: [P] scores of the others, gradient flows.

    Returns:
        [P], to be multiplied by a small coefficient.

    Source: Eisenstein et al. 2023, arXiv 2312.09244, eq. 2
    """
    check_same_shape(chosen=chosen, rejected=rejected)
    return (chosen + rejected).square()


def simpo(pairs: Pairs, params: SimpoParams) -> Tensor:
    """Simple preference optimization: per-token mean log-probs with a target margin g; m = b (a_w - a_l) - g.

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Source: Meng et al. 2024, arXiv 2405.14734, eq. 6
    """
    margin = params.beta * pairs.mean_score_margin - params.simpo_gamma
    return smoothed_logistic(margin, label_smoothing=params.label_smoothing)


def alphapo(pairs: Pairs, params: AlphaParams) -> Tensor:
    """SimPO with the reward r = (1 - exp(-alpha a)) / alpha, which equals the mean log-prob a if alpha is 0.

        -(1 - e) log sigmoid(m) - e log sigmoid(-m), m = b (r_w - r_l) - g

    alpha > 0 enlarges reward differences between unlikely responses, alpha < 0 between likely ones. The exponent is
    clamped as in `box_cox`.

    Source: Gupta et al. 2025, arXiv 2501.03884, section 3
    """
    chosen_reward = box_cox(pairs.chosen_log_ratio / pairs.chosen_lengths, power=-params.alpha)
    rejected_reward = box_cox(pairs.rejected_log_ratio / pairs.rejected_lengths, power=-params.alpha)
    margin = params.beta * (chosen_reward - rejected_reward) - params.simpo_gamma
    return smoothed_logistic(margin, label_smoothing=params.label_smoothing)


@dataclass(frozen=True, slots=True)
class OddsRatio:
    """ORPO's preference loss of P pairs, and the log odds ratio for logging."""

    loss: Tensor  # [P] nats, gradient flows
    log_odds_ratio: Tensor  # [P] nats, constant


def odds_ratio(chosen_mean_logps: Tensor, rejected_mean_logps: Tensor) -> OddsRatio:
    """ORPO's preference term: -log sigmoid(log odds(p_w) - log odds(p_l)), odds(p) = p / (1 - p).

    p = exp(mean log-prob) is the geometric mean of a response's token probabilities. It is clamped to at most
    1 - 1.2e-7, the float32 resolution near 1, and has no gradient above that.

    Args:
        chosen_mean_logps: [P] nats, <= 0, gradient flows.
        rejected_mean_logps: [P] nats, <= 0, gradient flows.

    Returns:
        loss [P], which the caller multiplies by lambda (beta in TRL) and adds to the negative log-likelihood of the
        chosen response; log_odds_ratio [P].

    Source: Hong et al. 2024, arXiv 2403.07691, eq. 4 to 7
    """
    check_same_shape(chosen_mean_logps=chosen_mean_logps, rejected_mean_logps=rejected_mean_logps)
    log_odds_ratio = _log_odds(chosen_mean_logps) - _log_odds(rejected_mean_logps)
    return OddsRatio(loss=-logsigmoid(log_odds_ratio), log_odds_ratio=log_odds_ratio.detach())


def _log_odds(mean_logps: Tensor) -> Tensor:
    below_one = mean_logps.clamp(max=-torch.finfo(mean_logps.dtype).eps)
    # log(1 - exp(x)), computed without the cancellation in 1 - exp(x) for x near 0.
    return below_one - torch.log(-torch.expm1(below_one))


CPO_LOSSES: dict[str, PairLoss[Any]] = {
    function.__name__: PairLoss(function, **vars(CPO_LOSS_FACTS[function.__name__]))
    for function in (sigmoid, hinge, ipo, simpo, alphapo)
}
