"""Group relative policy optimization."""

from __future__ import annotations

from prefrl.trainer.configs import GRPOConfig
from prefrl.trainer.online.policy_terms import PolicyBatch
from prefrl.trainer.online.trainer import OnlineTrainer


class GRPOTrainer(OnlineTrainer[PolicyBatch]):
    """Minimizes -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta * KL(pi || ref) over sampled tokens.

    r = exp(log pi - log pi_old); A = (reward - mean of its group) / (standard deviation + 1e-4); KL is Schulman's k3.
    Options choose other losses, advantage estimators and KL estimators; `GRPOConfig.preset` chooses those of a paper.
    See `OnlineTrainer` for the arguments.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, eq. 3; Yu et al. 2025 (DAPO), arXiv 2503.14476; Liu et
    al. 2025 (Dr. GRPO), arXiv 2503.20783; Zheng et al. 2025 (GSPO), arXiv 2507.18071.
    """

    # A step is `OnlineTrainer.micro_batches_of_step`, the advantages are `PolicyGradient`'s, the loss is
    # `PolicyObjective`'s: what `OnlineTrainer` does by default.
    algorithm = "grpo"
    config_class = GRPOConfig
    args: GRPOConfig
