"""Options that all policy-gradient trainers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.options.advantage import AdvantageParams
from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.policy_rules import HYPERPARAMETERS_RULES, KL_RULES, LEVEL_RULES, RATIO_RULES, PolicyGradientRules
from prefrl.options.rules import apply
from prefrl.trainer.base.options.reference import REFERENCE_RULES
from prefrl.trainer.online.balance_options import BalanceOptions
from prefrl.trainer.online.config import OnlineConfig
from prefrl.trainer.online.episode_options import CreditOptions
from prefrl.trainer.online.flat_names import PolicyGradientNames
from prefrl.trainer.online.policy_options import EntropyOptions, KLOptions, PolicyLossOptions
from prefrl.trainer.online.rollout_options import SelectionOptions
from prefrl.trainer.online.truncation_options import TRUNCATION_RULES, TruncationOptions

if TYPE_CHECKING:
    from prefrl.options.policy import Reduction

__all__ = ["GroupOptions", "PolicyGradientConfig"]


@dataclass
class GroupOptions:
    """How the completions of a prompt are compared."""

    scale_rewards: Literal["group", "batch", "none", True, False] = opt(
        "group",
        "Divide centered rewards by the standard deviation of their group (group) or of the whole batch (batch), or "
        "do not scale them (none; Dr. GRPO). True and False mean group and none.",
    )


@dataclass
class PolicyGradientConfig(
    PolicyLossOptions,
    EntropyOptions,
    KLOptions,
    TruncationOptions,
    BalanceOptions,
    SelectionOptions,
    CreditOptions,
    PolicyGradientNames,
    PolicyGradientRules,
    OnlineConfig,
):
    """How advantages are computed."""

    advantage_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the advantage estimator.",
        {name: row.params for name, row in ADVANTAGES.items()},
        switch="estimator",
        label="advantage_estimator",
        own_options=("scale_rewards", "gamma", "lam"),
    )
    normalize_advantages: bool = opt(
        False,
        "Normalize the advantages of a generation batch to mean 0 and standard deviation 1: over its tokens if each "
        "token has its own advantage (PPO, REINFORCE++), otherwise over its completions.",
    )

    advantage_params = ParamsOf("advantage_kwargs", AdvantageParams)

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, LEVEL_RULES, REFERENCE_RULES, KL_RULES, TRUNCATION_RULES, RATIO_RULES, HYPERPARAMETERS_RULES)

    @property
    def of_tokens(self) -> bool:
        """Whether each token has its own advantage."""
        return ADVANTAGES[self.estimator].level == "token"

    @property
    def reduction(self) -> Reduction:
        """How the loss is averaged."""
        return POLICY_LOSSES[self.loss_type].reduction

    @property
    def estimator(self) -> str:
        """The advantage estimator, by its name in `ADVANTAGES`."""
        raise NotImplementedError

    @property
    def needs_scores_first(self) -> bool:
        """Whether advantages or token selection depend on log-probs of the policy before its first update."""
        return (
            (self.kl_in == "reward" and self.beta > 0)
            or self.of_tokens
            or self.top_entropy_quantile < 1
            or self.loss_type in ("clip_cov", "kl_cov")
        )

    @property
    def needs_greedy(self) -> bool:
        """See `OnlineConfig.needs_greedy`."""
        return "greedy" in ADVANTAGES[self.estimator].needs
