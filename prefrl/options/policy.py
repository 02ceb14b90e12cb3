"""Options of policy losses: the hyperparameters of each, and what else is known of it without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import Rule, example, opt, when
from prefrl.options.params import Params, hyperparameters

Reduction = Literal["token", "sequence_mean", "sequence_sum", "constant"]


ImportanceLevel = Literal["token", "sequence", "sequence_token", "sequence_sum"]


KLEstimate = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full", "sequence"]
# Those whose value may be subtracted from a reward, which has no gradient.
IN_REWARD: tuple[KLEstimate, ...] = ("k1", "abs", "k2", "k3")


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


@hyperparameters
class CovarianceBand(Params):
    """Hyperparameters of `select_clip_cov`."""

    ratio: Annotated[float, Gt(0), Le(1)] = opt(2e-4, "Fraction of the tokens that is excluded from the loss.")
    lb: float = opt(1.0, "Lower bound of the covariance of the excluded tokens.")
    ub: float = opt(5.0, "Upper bound of the covariance of the excluded tokens.")

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.lb >= p.ub,
            "lb={lb}: must be below ub={ub}",
            example("grpo", loss_type="clip_cov", loss_kwargs={"lb": 6.0}),
        ),
    )


@hyperparameters
class HighestCovariance(Params):
    """Hyperparameters of `select_kl_cov`."""

    ratio: Annotated[float, Gt(0), Le(1)] = opt(
        2e-4, "Fraction of the tokens that gets a KL penalty: those with the largest covariance."
    )


@hyperparameters
class PolicyLossParams(Params):
    """Hyperparameters that go with every policy loss."""

    off_policy_mask_threshold: Annotated[float, Gt(0)] | None = opt(
        None,
        "Exclude sequences with a negative advantage from the loss if the mean of log sampler - log policy over their "
        "tokens is above this, in nats (DeepSeek-V3.2). By default, none is excluded.",
    )
    positive_nll_coef: Annotated[float, Gt(0)] | None = opt(
        None,
        "Weight of an NLL term added to the loss: the mean of -log p over the tokens of all sequences with a positive "
        "reward (VAPO). By default, there is no such term.",
    )
    min_filter_prefix_tokens: Annotated[int, Ge(1)] | None = opt(
        None,
        "Exclude prefixes of at least this many tokens from the policy loss if completions of a prompt share them "
        "although their rewards differ (cosmos-rl). By default, none is excluded.",
    )


@hyperparameters
class BoundParams(PolicyLossParams):
    """Bounds of a ratio, or of the quantity that a loss bounds instead."""

    epsilon: Annotated[float, Ge(0)] = opt(
        0.2, "The lower bound is 1 - epsilon. There is none if epsilon is 1 or more."
    )
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "The upper bound is 1 + epsilon_high. The default is the value of epsilon; DAPO uses 0.28."
    )

    @property
    def high(self) -> float:
        """The effective value of `epsilon_high`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Logarithms of 1 - epsilon and 1 + epsilon_high. Ratios are above 0, so epsilon >= 1 bounds none of them."""
        return math.log1p(-self.epsilon) if self.epsilon < 1 else -math.inf, math.log1p(self.high)


@hyperparameters
class ClipParams(BoundParams):
    """Hyperparameters of `clipped_surrogate`."""

    delta: float | None = opt(
        None,
        "Largest ratio where A < 0. It must be above 1 + epsilon_high. By default, there is no such bound. verl calls "
        "it clip_ratio_c, and cosmos-rl lower_bound_ratio.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.delta is not None and p.delta <= 1 + p.high,
            "delta={delta}: must be above 1 + epsilon_high = {least}, or the clipping never takes effect",
            example("grpo", delta=1.1),
            least=lambda p: 1 + p.high,
        ),
    )


@hyperparameters
class AipoParams(PolicyLossParams):
    """Hyperparameters of `aipo`."""

    rho: Annotated[float, Ge(1)] = opt(5.0, "Upper bound of the ratio. The paper tries 2 to 10.")


@hyperparameters
class DppoParams(BoundParams):
    """Hyperparameters of `dppo`. A probability may fall by epsilon and rise by epsilon_high."""

    delta: Annotated[float, Gt(0)] | None = opt(
        None,
        "Largest ratio, which bounds the weight of rare tokens. By default, there is no bound. verl calls it "
        "clip_ratio_c.",
    )


@hyperparameters
class SapoParams(PolicyLossParams):
    """Hyperparameters of `sapo`."""

    temperature_pos: Annotated[float, Gt(0)] = opt(1.0, "Temperature tau of the gate where A > 0.")
    temperature_neg: Annotated[float, Gt(0)] = opt(1.05, "Temperature tau of the gate where A <= 0.")


@hyperparameters
class GmpoParams(BoundParams):
    """Hyperparameters of `gmpo`."""

    epsilon: Annotated[float, Ge(0)] = opt(0.2, "The lower bound of d is -epsilon, in nats.")
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "Upper bound of d, in nats. The default is the value of epsilon. The paper uses 0.4 for both."
    )


@hyperparameters
class VespoParams(PolicyLossParams):
    """Hyperparameters of `vespo`: k is how fast rows with W < 1 lose weight, lambda how fast those with W > 1 do."""

    k_pos: Annotated[float, Ge(0)] = opt(2.0, "Exponent k of the weight W^k exp(lambda (1 - W)) where A >= 0.")
    lambda_pos: Annotated[float, Gt(0)] = opt(
        3.0, "Value of lambda in the weight W^k exp(lambda (1 - W)) where A >= 0."
    )
    k_neg: Annotated[float, Ge(0)] = opt(3.0, "Exponent k of the weight W^k exp(lambda (1 - W)) where A < 0.")
    lambda_neg: Annotated[float, Gt(0)] = opt(
        2.0, "Value of lambda in the weight W^k exp(lambda (1 - W)) where A < 0."
    )


@hyperparameters
class ClipCovParams(ClipParams, CovarianceBand):
    """Hyperparameters of `clip_cov` and of its selection."""


@hyperparameters
class KlCovParams(PolicyLossParams, HighestCovariance):
    """Hyperparameters of `kl_cov` and of its selection."""

    coef: Annotated[float, Ge(0)] = opt(1.0, "Weight of the KL penalty, which verl calls ppo_kl_coef.")


@hyperparameters
class KLParams(Params):
    """Hyperparameters that go with every KL term: the weight may adapt to the KL."""

    target: Annotated[float, Gt(0)] | None = opt(
        None,
        "Target KL, in nats per token. beta is then the initial weight, which adapts after each step to keep the KL "
        "near the target. By default, beta is fixed.",
    )
    horizon: Annotated[int, Ge(1)] = opt(
        10_000, "Number of rows over which beta adapts. With a smaller number it adapts faster."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.target is None and p.horizon != 10_000,
            "horizon={horizon!r} has no effect because beta is fixed. Set target.",
            example("grpo", kl_kwargs={"horizon": 20}),
        ),
    )


@hyperparameters
class SampledKLParams(KLParams):
    """Hyperparameters of the estimators of this module."""

    bias_correction: bool = opt(
        False,
        "Multiply the KL term of a token by its ratio, which makes it unbiased for samples of the old policy. Needs "
        "kl_in='loss'.",
    )


@hyperparameters
class SequenceKLParams(KLParams):
    """Hyperparameters of `sequence_kl`."""

    weight_cap: Annotated[float, Ge(1)] | None = opt(
        None, "Upper bound of the tokens' cumulative importance weights. By default there is no bound, and no bias."
    )


@hyperparameters
class TeacherKLParams(Params):
    """Hyperparameters of the KL term of a teacher."""

    estimator: KLEstimate | None = opt(
        None,
        "Estimator of the policy's KL from the teacher, one of those of kl_estimator. The default is 'full' in the "
        "loss and 'k1' in the reward.",
    )
    in_reward: bool = opt(
        False,
        "Subtract teacher_kl_coef * KL from the rewards of tokens or completions, instead of adding it to the loss.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.in_reward and p.name not in IN_REWARD,
            "estimator={estimator!r} with in_reward=True: a reward has no gradient, so only its value counts. Use "
            "'k1' (unbiased), 'k2', 'k3' or 'abs'.",
            example("grpo", teacher_kl_coef=0.5, teacher_kl_kwargs={"estimator": "full", "in_reward": True}),
        ),
    )

    @property
    def name(self) -> KLEstimate:
        """The effective value of `estimator`."""
        return self.estimator or ("k1" if self.in_reward else "full")


@hyperparameters
class EntropyParams(Params):
    """Hyperparameters of `AdaptiveEntropy`."""

    min: Annotated[float, Ge(0)] = opt(0.0, "Lower bound of the weight.")
    max: Annotated[float, Gt(0)] = opt(1.0, "Upper bound of the weight.")
    delta: Annotated[float, Gt(0)] = opt(0.005, "Change of the weight per step.")
    target: Annotated[float, Gt(0)] = opt(0.2, "Target entropy, in nats per token.")


@dataclass(frozen=True)
class PolicyLossFacts:
    """What is known of a policy loss without its function, which is in `prefrl.losses.policy.losses`."""

    params: type[PolicyLossParams]
    reduction: Reduction
    source: str
    # Allowed values of `PolicyTokens.level`. Losses that compute a row ratio themselves, or use none, have `token`.
    levels: tuple[ImportanceLevel, ...]


_COV = "Cui et al. 2025, arXiv 2505.22617, section 4.2"
_TOKEN: tuple[ImportanceLevel, ...] = ("token",)
# The ratio of a whole row must count once per row. In a mean over all tokens it would count once per token.
_NOT_SUM: tuple[ImportanceLevel, ...] = ("token", "sequence", "sequence_token")
_ANY: tuple[ImportanceLevel, ...] = (*_NOT_SUM, "sequence_sum")
# If the ratio is a constant weight, sequence and sequence_token are the same.
_WEIGHT: tuple[ImportanceLevel, ...] = ("token", "sequence", "sequence_sum")

# Counts span the whole optimizer step on all ranks. So bnpo, a token mean over one micro-batch in TRL, is the same as
# dapo here; configs accept both names. GSPO is grpo at level sequence or sequence_token.
POLICY_LOSS_FACTS: dict[LossType, PolicyLossFacts] = {
    "grpo": PolicyLossFacts(ClipParams, "sequence_mean", "Shao et al. 2024, arXiv 2402.03300, eq. 3", _ANY),
    "bnpo": PolicyLossFacts(ClipParams, "token", "TRL, GRPOConfig.loss_type", _NOT_SUM),
    "dr_grpo": PolicyLossFacts(ClipParams, "constant", "Liu et al. 2025, arXiv 2503.20783, section 3.2", _NOT_SUM),
    "dapo": PolicyLossFacts(ClipParams, "token", "Yu et al. 2025, arXiv 2503.14476, eq. 12", _NOT_SUM),
    "luspo": PolicyLossFacts(
        ClipParams, "sequence_sum", "LUSPO 2026, arXiv 2602.05261", ("sequence", "sequence_token")
    ),
    "cispo": PolicyLossFacts(BoundParams, "token", "MiniMax 2025, arXiv 2506.13585, section 3.1", _WEIGHT),
    "sapo": PolicyLossFacts(SapoParams, "sequence_mean", "Gao et al. 2025, arXiv 2511.20347", _ANY),
    "gmpo": PolicyLossFacts(GmpoParams, "sequence_mean", "Zhao et al. 2025, arXiv 2507.20673", _TOKEN),
    "gpg": PolicyLossFacts(PolicyLossParams, "token", "Chu et al. 2025, arXiv 2504.02546", _TOKEN),
    "reinforce": PolicyLossFacts(PolicyLossParams, "sequence_sum", "Williams 1992", _TOKEN),
    "aipo": PolicyLossFacts(AipoParams, "token", "Wu et al. 2025, arXiv 2505.24034", _WEIGHT),
    "dppo": PolicyLossFacts(DppoParams, "token", "Qi et al. 2026, arXiv 2602.04879", _TOKEN),
    "vespo": PolicyLossFacts(VespoParams, "token", "Shen et al. 2026, arXiv 2602.10693", _TOKEN),
    "clip_cov": PolicyLossFacts(ClipCovParams, "token", _COV, ("token", "sequence_token")),
    "kl_cov": PolicyLossFacts(KlCovParams, "token", _COV, _TOKEN),
}

# The hyperparameters of each estimate of the KL divergence; those that are sampled are in `KL_ESTIMATORS`.
KL_PARAMS: dict[str, type[KLParams]] = {
    **dict.fromkeys(("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"), SampledKLParams),
    "full": KLParams,
    "sequence": SequenceKLParams,
}
