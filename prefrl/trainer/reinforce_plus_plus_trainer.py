"""REINFORCE++: token rewards without a critic, and advantages normalized over the batch."""

from __future__ import annotations

from prefrl.trainer.configs import ReinforcePlusPlusConfig
from prefrl.trainer.online.policy_terms import PolicyBatch
from prefrl.trainer.online.trainer import OnlineTrainer


class ReinforcePlusPlusTrainer(OnlineTrainer[PolicyBatch]):
    """Minimizes -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) over tokens.

    A_t = sum over s >= t of gamma^(s - t) r_s, normalized over the tokens of the batch; r_s is
    -beta * (log pi_old - log pi_ref), plus the reward on the last token. The baseline variant instead subtracts the
    mean reward of the prompt's completions. See `OnlineTrainer` for the arguments.

    Source: Hu et al. 2025, arXiv 2501.03262.
    """

    algorithm = "reinforce_plus_plus"
    config_class = ReinforcePlusPlusConfig
    args: ReinforcePlusPlusConfig
