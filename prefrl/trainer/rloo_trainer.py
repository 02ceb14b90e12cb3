"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from prefrl.trainer.configs import RLOOConfig
from prefrl.trainer.online.policy_terms import PolicyBatch
from prefrl.trainer.online.trainer import OnlineTrainer


class RLOOTrainer(OnlineTrainer[PolicyBatch]):
    """Minimizes -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) over completions.

    r is the ratio of the probabilities of the whole completion; A = R - mean of R over the prompt's other completions;
    R = reward - beta * (log pi_old - log pi_ref), summed over the completion. See `OnlineTrainer` for the arguments.

    Source: Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019 (leave-one-out).
    """

    algorithm = "rloo"
    config_class = RLOOConfig
    args: RLOOConfig
