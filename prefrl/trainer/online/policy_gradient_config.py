"""Options that all policy-gradient trainers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prefrl.errors import ConfigError
from prefrl.losses.advantage.estimators import ADVANTAGES, AdvantageParams, GrpoParams, ScaleParams
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.options.fields import opt
from prefrl.trainer.base.options.kwargs import KwargsOption, KwargsValue
from prefrl.trainer.online.balance_options import BALANCE, BalanceOptions
from prefrl.trainer.online.config import OnlineConfig
from prefrl.trainer.online.episode_options import CreditOptions
from prefrl.trainer.online.flat_names import PolicyGradientNames
from prefrl.trainer.online.policy_options import ENTROPY, KL, LOSS, EntropyOptions, KLOptions, PolicyLossOptions
from prefrl.trainer.online.policy_rules import check_ratio
from prefrl.trainer.online.rollout_options import SELECTION, SelectionOptions
from prefrl.trainer.online.truncation_options import TruncationOptions

__all__ = ["ADVANTAGE", "GroupOptions", "PolicyGradientConfig"]

ADVANTAGE: KwargsOption[AdvantageParams] = KwargsOption(
    "advantage_kwargs",
    "Hyperparameters of the advantage estimator.",
    switch="estimator",
    label="advantage_estimator",
    choices={name: row.params for name, row in ADVANTAGES.items()},
    own_options=("scale_rewards", "gamma", "lam"),
)


@dataclass
class GroupOptions:
    """How the completions of a prompt are compared."""

    scale_rewards: Literal["group", "batch", "none"] = opt(
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
    OnlineConfig,
):
    """How advantages are computed."""

    kwargs_options: ClassVar[tuple[KwargsOption[Any], ...]] = (
        *OnlineConfig.kwargs_options,
        LOSS,
        ENTROPY,
        KL,
        ADVANTAGE,
        BALANCE,
        SELECTION,
    )

    advantage_kwargs: KwargsValue = opt(None, ADVANTAGE.help)
    normalize_advantages: bool = opt(
        False,
        "Normalize the advantages of a generation batch to mean 0 and standard deviation 1: over its tokens if each "
        "token has its own advantage (PPO, REINFORCE++), otherwise over its completions.",
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        self.validate_policy_loss()
        self.validate_entropy()
        self.validate_kl()
        self.validate_truncation()
        if self.kl_estimator == "sequence" and POLICY_LOSSES[self.loss_type].reduction == "sequence_mean":
            raise ConfigError(
                f"kl_estimator='sequence' with loss_type={self.loss_type!r}: it weights sequences by 1 / length, "
                "but the KL of a sequence is a sum over its tokens. Use a loss that sums or averages over all tokens."
            )
        check_ratio(self, of_tokens=ADVANTAGES[self.estimator].level == "token")
        if self.reward_balance is not None:
            self._validate_balance()
        self.validate_selection(num_generations=self.num_generations)
        self.validate_credit(
            estimator=self.estimator,
            of_tokens=ADVANTAGES[self.estimator].level == "token",
            total_only=self._on_totals,
        )

    @property
    def _on_totals(self) -> str | None:
        """An option that applies to the total rewards of completions, as text; None: none is set."""
        params = self.advantage_params
        given = {
            "reward_shaping_kwargs": self.shaping_params.has_effect,
            f"reward_balance={self.reward_balance!r}": self.reward_balance is not None,
            "normalize_advantages=True": self.normalize_advantages,
            "scale_rewards='batch'": isinstance(params, ScaleParams) and params.scale_rewards == "batch",
            "multi_objective_aggregation='normalize_then_sum'": isinstance(params, GrpoParams)
            and params.multi_objective_aggregation == "normalize_then_sum",
        }
        return next((name for name, is_set in given.items() if is_set), None)

    def _validate_balance(self) -> None:
        if ADVANTAGES[self.estimator].level == "token":
            raise ConfigError(
                f"reward_balance={self.reward_balance!r} with token-level advantages ({self.estimator}): only "
                "advantages of completions are computed for each reward. Use GRPO or RLOO."
            )
        if self.shaping_params.has_effect or self.kl_in == "reward" or self.needs_greedy:
            raise ConfigError(
                f"reward_balance={self.reward_balance!r} weights the advantages of each reward, but kl_in='reward', "
                "reward_shaping_kwargs and a greedy baseline apply to the total reward. Remove them."
            )
        if self.reward_balance != "fixed" and min(self.reward_weights or [1.0]) < 0:
            raise ConfigError(
                f"reward_weights={self.reward_weights}: reward_balance={self.reward_balance!r} needs weights >= 0. "
                "Change the sign of the reward, or use 'fixed'."
            )

    @property
    def estimator(self) -> str:
        """The advantage estimator, by its name in `ADVANTAGES`."""
        raise NotImplementedError

    @property
    def advantage_params(self) -> AdvantageParams:
        """The hyperparameters of the estimator."""
        return ADVANTAGE.of(self)

    @property
    def needs_scores_first(self) -> bool:
        """Whether advantages or token selection depend on log-probs of the policy before its first update."""
        return (
            (self.kl_in == "reward" and self.beta > 0)
            or ADVANTAGES[self.estimator].level == "token"
            or self.top_entropy_quantile < 1
            or self.loss_type in ("clip_cov", "kl_cov")
        )

    @property
    def needs_greedy(self) -> bool:
        """See `OnlineConfig.needs_greedy`."""
        return "greedy" in ADVANTAGES[self.estimator].needs

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """See `OnlineConfig.needs_whole_batch`."""
        needs = super().needs_whole_batch
        if self.normalize_advantages:
            needs["normalize_advantages=True"] = "Set it to False."
        if self.top_entropy_quantile < 1:
            needs[f"top_entropy_quantile={self.top_entropy_quantile}"] = "Set it to 1."
        if self.loss_type in ("clip_cov", "kl_cov"):
            needs[f"loss_type={self.loss_type!r}"] = "Use another loss."
        given = {
            "rollout_selection": self.rollout_selection if self.resamples_rollouts else None,
            "loss_kwargs: positive_nll_coef": self.loss_params.positive_nll_coef,
            "reward_balance": self.reward_balance,
        }
        return needs | {f"{name}={value!r}": "Remove it." for name, value in given.items() if value is not None}
