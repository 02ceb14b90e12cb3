"""Pairwise losses without a reference model: CPO, SimPO, AlphaPO, ORPO, and those of reward models.

CPO's losses take `Pairs` whose reference log-probs are 0, as if all responses were equally likely under it: three of
them are DPO's. In the formulas l_w, l_l are the log-probs of the chosen and the rejected response, summed over tokens,
a_w, a_l their means over tokens, b is beta > 0, g is simpo_gamma and e is label_smoothing. The caller adds CPO's
negative log-likelihood of the chosen response.

Tensors with an entry for each token, row or pair need equal shapes: functions raise ValueError if they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from prefrl.losses.per_token import check_same_shape
from prefrl.losses.preference.pairwise import PairLoss, Pairs, box_cox, hinge, ipo, sigmoid, smoothed_logistic
from prefrl.options.preference import CPO_LOSS_FACTS, AlphaParams, SimpoParams


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
