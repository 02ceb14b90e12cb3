"""Pairwise losses without a reference model: CPO, SimPO, AlphaPO and ORPO.

Every CPO loss is called as f(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths, **hyperparameters) and
returns [P], for P pairs:

    chosen_logps, rejected_logps      [P] nats, log pi(y | x) summed over tokens, gradient flows
    chosen_lengths, rejected_lengths  [P] float32, tokens with a loss, >= 1

In the formulas l_w, l_l are these log-probs, a_w, a_l their means over tokens, b is beta > 0, g is simpo_gamma and e
is label_smoothing. The caller adds CPO's negative log-likelihood of the chosen response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from prefrl.losses.checks import check_same_shape
from prefrl.losses.preference.pairwise import box_cox, smoothed_logistic
from prefrl.losses.table import LossRow

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CPO_LOSSES", "OddsRatio", "odds_ratio"]


def sigmoid(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Direct preference optimization with a uniform reference; m = b (l_w - l_l).

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Raises:
        ValueError: Shapes differ, or `label_smoothing` is not in 0 .. 0.5.

    Source: Xu et al. 2024 (CPO), arXiv 2401.08417, eq. 3
    """
    _check_shapes(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths)
    return smoothed_logistic(beta * (chosen_logps - rejected_logps), label_smoothing=label_smoothing)


def hinge(
    chosen_logps: Tensor, rejected_logps: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float
) -> Tensor:
    """SLiC: max(0, 1 - b (l_w - l_l)).

    Raises:
        ValueError: Shapes differ.

    Source: Zhao et al. 2023 (SLiC-HF), arXiv 2305.10425, section 2
    """
    _check_shapes(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths)
    return torch.relu(1 - beta * (chosen_logps - rejected_logps))


def ipo(
    chosen_logps: Tensor, rejected_logps: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float
) -> Tensor:
    """IPO with a uniform reference: (a_w - a_l - 1 / (2 b))^2.

    Raises:
        ValueError: Shapes differ.

    Source: Azar et al. 2023, arXiv 2310.12036, eq. 17
    """
    _check_shapes(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths)
    return (chosen_logps / chosen_lengths - rejected_logps / rejected_lengths - 1 / (2 * beta)).square()


def simpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    simpo_gamma: float,
) -> Tensor:
    """Simple preference optimization: per-token mean log-probs with a target margin g; m = b (a_w - a_l) - g.

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Raises:
        ValueError: Shapes differ, or `label_smoothing` is not in 0 .. 0.5.

    Source: Meng et al. 2024, arXiv 2405.14734, eq. 6
    """
    return alphapo(
        chosen_logps,
        rejected_logps,
        chosen_lengths,
        rejected_lengths,
        beta=beta,
        label_smoothing=label_smoothing,
        simpo_gamma=simpo_gamma,
        alpha=0.0,
    )


def alphapo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    simpo_gamma: float,
    alpha: float,
) -> Tensor:
    """SimPO with the reward r = (1 - exp(-alpha a)) / alpha, which equals the mean log-prob a if alpha is 0.

        -(1 - e) log sigmoid(m) - e log sigmoid(-m), m = b (r_w - r_l) - g

    alpha > 0 enlarges reward differences between unlikely responses, alpha < 0 between likely ones. The exponent is
    clamped as in `box_cox`.

    Raises:
        ValueError: Shapes differ, or `label_smoothing` is not in 0 .. 0.5.

    Source: Gupta et al. 2025, arXiv 2501.03884, section 3
    """
    _check_shapes(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths)
    chosen_reward = box_cox(chosen_logps / chosen_lengths, power=-alpha)
    rejected_reward = box_cox(rejected_logps / rejected_lengths, power=-alpha)
    return smoothed_logistic(beta * (chosen_reward - rejected_reward) - simpo_gamma, label_smoothing=label_smoothing)


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

    Raises:
        ValueError: Shapes differ.

    Source: Hong et al. 2024, arXiv 2403.07691, eq. 4 to 7
    """
    check_same_shape(chosen_mean_logps=chosen_mean_logps, rejected_mean_logps=rejected_mean_logps)
    log_odds_ratio = _log_odds(chosen_mean_logps) - _log_odds(rejected_mean_logps)
    return OddsRatio(loss=-logsigmoid(log_odds_ratio), log_odds_ratio=log_odds_ratio.detach())


def _log_odds(mean_logps: Tensor) -> Tensor:
    below_one = mean_logps.clamp(max=-torch.finfo(mean_logps.dtype).eps)
    # log(1 - exp(x)), computed without the cancellation in 1 - exp(x) for x near 0.
    return below_one - torch.log(-torch.expm1(below_one))


def _check_shapes(
    chosen_logps: Tensor, rejected_logps: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> None:
    check_same_shape(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )


CPO_LOSSES: dict[str, LossRow] = {
    "sigmoid": LossRow(sigmoid, "Xu et al. 2024, arXiv 2401.08417, eq. 3"),
    "hinge": LossRow(hinge, "Zhao et al. 2023, arXiv 2305.10425, section 2"),
    "ipo": LossRow(ipo, "Azar et al. 2023, arXiv 2310.12036, eq. 17"),
    "simpo": LossRow(simpo, "Meng et al. 2024, arXiv 2405.14734, eq. 6"),
    "alphapo": LossRow(alphapo, "Gupta et al. 2025, arXiv 2501.03884, section 3"),
}
