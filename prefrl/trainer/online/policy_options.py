"""Options of policy-gradient losses: the loss, its entropy terms, and its KL term."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.losses.policy.losses import POLICY_LOSSES, ImportanceLevel
from prefrl.trainer.base.options import check_no_effect, opt
from prefrl.trainer.base.reference_options import ReferenceOptions

__all__ = ["EntropyOptions", "KLEstimate", "KLOptions", "LossType", "PolicyLossOptions"]

LossType = Literal[
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "luspo",
    "reinforce",
    "gpg",
    "cispo",
    "aipo",
    "dppo",
    "sapo",
    "gmpo",
    "vespo",
    "clip_cov",
    "kl_cov",
]
KLEstimate = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full", "sequence"]


def _refuse(config: Any, group: type, names: Iterable[str], *, because: str, remedy: str) -> None:
    """Reject these options of a group if they are set."""
    defaults = {field.name: field.default for field in fields(config) if field.name in group.__annotations__}
    for name in names:
        check_no_effect(name=name, value=getattr(config, name), unset=defaults[name], because=because, remedy=remedy)


@dataclass
class PolicyLossOptions:
    """The policy loss."""

    loss_type: LossType = opt(
        "dapo",
        "The loss and how it is averaged. With PPO's clipped surrogate: grpo, mean over sequences of token means; "
        "dapo and bnpo, mean over all tokens of the step; dr_grpo, sum over tokens / (number of sequences * "
        "max_completion_length); luspo, mean over sequences of token sums. See docs/losses.md for the others.",
    )
    importance_sampling_level: ImportanceLevel = opt(
        "token",
        "Level of the ratio. token: one for each token. sequence: one for each sequence, from its mean log-ratio "
        "(GSPO). sequence_token: the same value, but each token has its own gradient (GSPO-token). sequence_sum: one "
        "for each sequence, from its summed log-ratio (RLOO).",
    )
    epsilon: Annotated[float, Ge(0), Le(1)] = opt(
        0.2, "Clip the ratio to at least 1 - epsilon. dppo: how far a probability may fall (epsilon_high: rise)."
    )
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "Clip the ratio to at most 1 + epsilon_high; None: same as epsilon. DAPO uses 0.28."
    )
    delta: Annotated[float, Gt(0)] | None = opt(
        None,
        "Upper bound of the ratio where epsilon does not clip it, for two-sided (dual) clipping; must be above "
        "1 + epsilon_high. Called clip_ratio_c in verl, lower_bound_ratio in cosmos-rl.",
    )
    aipo_rho: Annotated[float, Gt(1)] = opt(5.0, "aipo: upper bound of the ratio; the paper tries 2 to 10.")
    sapo_temperature_pos: Annotated[float, Gt(0)] = opt(1.0, "sapo: temperature for positive advantages.")
    sapo_temperature_neg: Annotated[float, Gt(0)] = opt(1.05, "sapo: temperature for negative advantages.")
    vespo_k_pos: Annotated[float, Ge(0)] = opt(2.0, "vespo: power of the ratio for positive advantages.")
    vespo_lambda_pos: Annotated[float, Gt(0)] = opt(3.0, "vespo: decay of the ratio for positive advantages.")
    vespo_k_neg: Annotated[float, Ge(0)] = opt(3.0, "vespo: power of the ratio for negative advantages.")
    vespo_lambda_neg: Annotated[float, Gt(0)] = opt(2.0, "vespo: decay of the ratio for negative advantages.")
    clip_cov_ratio: Annotated[float, Gt(0), Le(1)] = opt(2e-4, "clip_cov: share of tokens excluded from the loss.")
    clip_cov_lb: float = opt(1.0, "clip_cov: only tokens whose covariance is above this are excluded.")
    clip_cov_ub: float = opt(5.0, "clip_cov: only tokens whose covariance is below this are excluded.")
    kl_cov_ratio: Annotated[float, Gt(0), Le(1)] = opt(
        2e-4, "kl_cov: share of tokens with a KL penalty: those with the largest covariance."
    )
    kl_cov_coef: Annotated[float, Gt(0)] = opt(1.0, "kl_cov: weight of the KL penalty.")
    off_policy_mask_threshold: Annotated[float, Gt(0)] | None = opt(
        None,
        "Exclude sequences with a negative advantage from the loss if the mean of log sampler - log policy over their "
        "tokens is above this, in nats (DeepSeek-V3.2); None: exclude none.",
    )
    positive_nll_coef: Annotated[float, Gt(0)] | None = opt(
        None,
        "Weight of an NLL term added to the loss: the mean of -log p over the tokens of all sequences with a positive "
        "reward (VAPO); None: term off.",
    )

    @property
    def policy_hyperparameters(self) -> dict[str, float | None]:
        """The hyperparameters of the chosen loss, by name."""
        values = {name: getattr(self, name) for name in POLICY_LOSSES[self.loss_type].hyperparameters}
        if "epsilon_high" in values and self.epsilon_high is None:
            values["epsilon_high"] = self.epsilon
        return values

    def validate_policy_loss(self) -> None:
        """Reject options that the chosen loss does not read, and bounds that exclude each other.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        loss = POLICY_LOSSES[self.loss_type]
        if self.importance_sampling_level not in loss.levels:
            raise ConfigError(
                f"importance_sampling_level={self.importance_sampling_level!r} with loss_type={self.loss_type!r}: "
                f"this loss goes with {' and '.join(map(repr, sorted(loss.levels)))}."
            )
        read = {key: row.hyperparameters | row.selection_hyperparameters for key, row in POLICY_LOSSES.items()}
        hyperparameters = set(PolicyLossOptions.__annotations__) - _COMMON
        users = {name: [key for key, names in read.items() if name in names] for name in hyperparameters}
        for name in sorted(hyperparameters - read[self.loss_type]):
            remedy = f"It goes with loss_type {', '.join(map(repr, users[name]))}."
            _refuse(self, PolicyLossOptions, [name], because=f"loss_type={self.loss_type!r}", remedy=remedy)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta={self.delta}: must be above 1 + epsilon_high = {1 + high}, or the clipping never takes effect"
            )
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ConfigError(f"clip_cov_lb={self.clip_cov_lb}: must be below clip_cov_ub={self.clip_cov_ub}")


# Fields that are not specific to a loss.
_COMMON = {
    "loss_type",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "positive_nll_coef",
}


@dataclass
class EntropyOptions:
    """The entropy bonus, and the selection of tokens by entropy."""

    entropy_coef: Annotated[float, Ge(0)] = opt(0.0, "Weight of the entropy bonus; if adaptive, the initial weight.")
    use_adaptive_entropy: bool = opt(
        False, "Adapt entropy_coef after each step to keep the entropy at entropy_target; no bonus above the target."
    )
    entropy_coef_min: Annotated[float, Ge(0)] = opt(0.0, "Lower bound of the adaptive weight.")
    entropy_coef_max: Annotated[float, Gt(0)] = opt(1.0, "Upper bound of the adaptive weight.")
    entropy_coef_delta: Annotated[float, Gt(0)] = opt(0.005, "Change of the adaptive weight per step.")
    entropy_target: Annotated[float, Gt(0)] = opt(0.2, "Target entropy, in nats per token.")
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = opt(
        1.0,
        "Compute the policy loss only on this share of the tokens of a generation batch: those with the highest "
        "entropy. Below 1, the batch needs an additional forward pass.",
    )

    def validate_entropy(self) -> None:
        """Reject options of an adaptive weight if the weight is fixed.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        if not self.use_adaptive_entropy:
            names = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
            remedy = "Set use_adaptive_entropy=True."
            _refuse(self, EntropyOptions, names, because="use_adaptive_entropy=False", remedy=remedy)
        elif not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef}: must be in entropy_coef_min {self.entropy_coef_min} .. "
                f"entropy_coef_max {self.entropy_coef_max}"
            )


@dataclass
class KLOptions(ReferenceOptions):
    """The KL term, and the reference model, which the policy stays close to."""

    kl_estimator: KLEstimate = opt(
        "k3",
        "Estimator of the policy's KL from the reference, per token: Schulman's k1, k2 or k3, or abs; with +, its "
        "value has the gradient of k2. full: the KL of the full distributions. sequence: exact also for samples of "
        "another policy, and includes the effect of a token on later tokens.",
    )
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "Whether beta * KL is added to the loss or subtracted from the reward."
    )
    use_bias_correction_kl: bool = opt(
        False, "Multiply the KL term of a token by its ratio, which makes it unbiased for samples of the old policy."
    )
    kl_weight_cap: Annotated[float, Ge(1)] | None = opt(
        None, "kl_estimator sequence: upper bound of cumulative importance weights of tokens; None: no bound, no bias."
    )
    kl_controller: Literal["fixed", "adaptive"] = opt(
        "fixed", "adaptive: beta is the initial weight, and adapts after each step to keep the KL near kl_target."
    )
    kl_target: Annotated[float, Gt(0)] = opt(0.1, "adaptive: target KL, in nats per token.")
    kl_horizon: Annotated[int, Ge(1)] = opt(
        10_000, "adaptive: number of rows over which the weight adapts; a smaller number adapts faster."
    )

    def validate_kl(self) -> None:
        """Reject options of a KL term that is off, and options of another estimator or controller.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        self.validate_reference()
        if self.beta == 0:
            names = ("kl_estimator", "kl_in", "use_bias_correction_kl", "kl_weight_cap", "kl_controller")
            _refuse(self, KLOptions, names, because="beta=0.0: there is no KL term", remedy="Set beta > 0.")
        if self.kl_controller == "fixed":
            remedy = "Set kl_controller='adaptive'."
            _refuse(self, KLOptions, ("kl_target", "kl_horizon"), because="kl_controller='fixed'", remedy=remedy)
        if self.kl_estimator != "sequence":
            remedy = "Set kl_estimator='sequence'."
            _refuse(self, KLOptions, ["kl_weight_cap"], because=f"kl_estimator={self.kl_estimator!r}", remedy=remedy)
        if self.use_bias_correction_kl and self.kl_estimator in ("sequence", "full"):
            raise ConfigError(
                f"use_bias_correction_kl=True with kl_estimator={self.kl_estimator!r}: that estimate has importance "
                "weights of its own, or is not of the sampled token. Leave it False."
            )
        if self.kl_estimator == "full" and self.sync_ref_model:
            raise ConfigError(
                "kl_estimator='full' with sync_ref_model=True: it keeps hidden states of the reference, which belong "
                "to its weights before it moves. Use another estimator, or leave sync_ref_model False."
            )
        if self.kl_in == "reward":
            self._validate_kl_in_reward()

    def _validate_kl_in_reward(self) -> None:
        if self.kl_estimator not in ("k1", "abs", "k2", "k3"):
            raise ConfigError(
                f"kl_estimator={self.kl_estimator!r} with kl_in='reward': a reward has no gradient, so only its value "
                "counts. Use 'k1' (unbiased), 'k2', 'k3' or 'abs'."
            )
        if self.use_bias_correction_kl:
            raise ConfigError(
                "use_bias_correction_kl=True has no effect because kl_in='reward': the ratio of the policy loss "
                "weighs the whole reward. Leave it False."
            )
