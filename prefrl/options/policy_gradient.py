"""Options of policy-gradient trainers: how completions are credited, compared and weighted, and their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.balance import BALANCE_PARAMS
from prefrl.options.distillation import TeacherOptions
from prefrl.options.fields import Rule, apply, ascending, check_unset, example, flat, opt, when
from prefrl.options.online import OnlineOptions
from prefrl.options.params import KwargsValue, Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.policy import (
    KL_PARAMS,
    POLICY_LOSS_FACTS,
    EntropyParams,
    ImportanceLevel,
    KLEstimate,
    KLParams,
    LossType,
    PolicyLossParams,
    Reduction,
    TeacherKLParams,
)
from prefrl.options.policy_rules import (
    HYPERPARAMETERS_RULES,
    JOURNAL_RULES,
    KL_RULES,
    LEVEL_RULES,
    RATIO_RULES,
    TEACHER_RULES,
    normalizes_each_reward,
    scales_by_batch,
)
from prefrl.options.preference import REFERENCE_RULES, ReferenceOptions
from prefrl.options.rollout import SELECTIONS, RowSelection

RewardScale = Literal["group", "batch", "none"]


@hyperparameters
class AdvantageParams(Params):
    """Hyperparameters that go with every estimator."""

    clip_range: list[float] | None = opt(
        None,
        "Clip advantages to this range: the smallest value (at most 0) and the largest (at least 0). By default, "
        "nothing is clipped.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("clip_range", example("grpo", advantage_kwargs={"clip_range": [1.0]})),
        when(
            lambda p: p.clip_range is not None and not p.clip_range[0] <= 0 <= p.clip_range[1],
            "clip_range={clip_range}: must contain 0, as in [-5, 5]",  # or rows without a reward would have a gradient
            example("grpo", advantage_kwargs={"clip_range": [1.0, 2.0]}),
        ),
    )


@hyperparameters
class ScaleParams(AdvantageParams):
    """What centered rewards are divided by; hyperparameters of `grpo_passk`."""

    scale_rewards: RewardScale = opt(
        "group",
        "What to divide by: the standard deviation of the group ('group') or of the batch ('batch'), or nothing "
        "('none').",
    )
    advantage_epsilon: Annotated[float, Ge(0)] = opt(
        1e-4, "Number that is added to standard deviations before dividing by them."
    )


@hyperparameters
class GrpoParams(ScaleParams):
    """Hyperparameters of `grpo`."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = opt(
        "sum_then_normalize",
        "With several rewards: take their weighted sum first and normalize that, or normalize each reward first "
        "(GDPO).",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.multi_objective_aggregation == "normalize_then_sum" and p.scale_rewards != "group",
            "scale_rewards={scale_rewards!r} has no effect with multi_objective_aggregation='normalize_then_sum', "
            "which normalizes by group and then by batch. Use scale_rewards='group'.",
            example(
                "grpo",
                scale_rewards="none",
                advantage_kwargs={"multi_objective_aggregation": "normalize_then_sum"},
            ),
        ),
    )


@hyperparameters
class GpgParams(AdvantageParams):
    """Hyperparameters of `gpg`."""

    f_norm: Annotated[float, Gt(0)] = opt(1.0, "Number by which advantages are divided. It is 1 in the paper.")


@hyperparameters
class DiscountParams(AdvantageParams):
    """Hyperparameters of `reinforce_plus_plus`."""

    gamma: Annotated[float, Ge(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")


@hyperparameters
class GaeParams(DiscountParams):
    """Hyperparameters of `gae`."""

    lam: Annotated[float, Ge(0), Le(1)] = opt(
        0.95,
        "At 0 the advantage is the one-step TD error, which has the critic's bias. At 1 it uses all later rewards, "
        "which have more variance.",
    )


@hyperparameters
class BaselineParams(AdvantageParams):
    """Hyperparameters of `optimal_token_baseline`."""

    zero_tail: bool = opt(
        True,
        "Use no baseline at positions that only one completion of a prompt reaches. Otherwise, the completion is its "
        "own baseline there, so its advantage is 0.",
    )


@dataclass(frozen=True)
class EstimatorFacts:
    """What is known of an advantage estimator without its function, which is in `prefrl.losses.advantage`."""

    params: type[AdvantageParams]
    level: Literal["row", "token"]
    source: str
    whitened: bool = False  # the caller whitens the result over the trainable tokens of all ranks
    needs: frozenset[str] = frozenset()  # optional fields of `ScoredRows` or `ScoredTokens` that it requires


ESTIMATOR_FACTS: dict[str, EstimatorFacts] = {
    "grpo": EstimatorFacts(GrpoParams, "row", "Shao et al. 2024, arXiv 2402.03300, section 4.1.2"),
    "rloo": EstimatorFacts(AdvantageParams, "row", "Ahmadian et al. 2024, arXiv 2402.14740"),
    "reinforce_plus_plus_baseline": EstimatorFacts(
        AdvantageParams, "row", "Hu et al. 2025, arXiv 2501.03262", whitened=True
    ),
    "remax": EstimatorFacts(AdvantageParams, "row", "Li et al. 2023, arXiv 2310.10505", needs=frozenset({"greedy"})),
    "opo": EstimatorFacts(AdvantageParams, "row", "Hao et al. 2025, arXiv 2505.23585"),
    "gpg": EstimatorFacts(GpgParams, "row", "Chu et al. 2025, arXiv 2504.02546"),
    "grpo_passk": EstimatorFacts(ScaleParams, "row", "Tang et al. 2025, arXiv 2503.19595"),
    "maxrl": EstimatorFacts(AdvantageParams, "row", "Tajwar et al. 2026, arXiv 2602.02710"),
    "gae": EstimatorFacts(
        GaeParams,
        "token",
        "Schulman et al. 2015, arXiv 1506.02438, eq. 16",
        whitened=True,
        needs=frozenset({"values"}),
    ),
    "reinforce_plus_plus": EstimatorFacts(DiscountParams, "token", "Hu et al. 2025, arXiv 2501.03262", whitened=True),
    "optimal_token_baseline": EstimatorFacts(
        BaselineParams,
        "token",
        "Li et al. 2026, arXiv 2602.07078",
        needs=frozenset({"logprobs", "log_collision"}),
    ),
}


@dataclass(init=False, repr=False, eq=False)
class CreditOptions(OnlineOptions):
    """Which completions are learned from, and how rewards become advantages of turns and of several rewards."""

    # Names of TRL for keys of mappings.
    sapo_temperature_pos: float | None = flat("loss_kwargs", "temperature_pos")
    sapo_temperature_neg: float | None = flat("loss_kwargs", "temperature_neg")
    vespo_k_pos: float | None = flat("loss_kwargs", "k_pos")
    vespo_lambda_pos: float | None = flat("loss_kwargs", "lambda_pos")
    vespo_k_neg: float | None = flat("loss_kwargs", "k_neg")
    vespo_lambda_neg: float | None = flat("loss_kwargs", "lambda_neg")
    off_policy_mask_threshold: float | None = flat("loss_kwargs", "off_policy_mask_threshold")
    entropy_coef_min: float | None = flat("entropy_kwargs", "min")
    entropy_coef_max: float | None = flat("entropy_kwargs", "max")
    entropy_coef_delta: float | None = flat("entropy_kwargs", "delta")
    entropy_target: float | None = flat("entropy_kwargs", "target")
    multi_objective_aggregation: str | None = flat("advantage_kwargs", "multi_objective_aggregation")
    use_bias_correction_kl: bool | None = flat("kl_kwargs", "bias_correction")

    turn_credit: Literal["episode", "return"] = opt(
        "episode",
        "Which rewards a turn is credited with: the total, which is the same for all turns ('episode'), or those from "
        "this turn on ('return'), compared with the same sum of the prompt's other episodes, where episodes that are "
        "over count as 0. With token-level advantages (PPO, REINFORCE++), each reward belongs to the last token of "
        "its turn.",
    )
    turn_discount: Annotated[float, Ge(0), Le(1)] = opt(
        1.0, "Discount factor of rewards, per turn. Needs turn_credit='return' and completion-level advantages."
    )
    rollout_selection: RowSelection | None = opt(
        None,
        "Train on only some of the completions. Three rules select num_selected of each prompt: those whose rewards "
        "have the largest variance ('max_variance', PODS), those with the best rewards ('best'), or a random subset "
        "('random'). Three others resample the batch with replacement (PF-PPO): in proportion to abs(reward)^power "
        "('pow'), from the best and the worst ('max_min'), or mostly from the best ('max_random').",
    )
    selection_kwargs: KwargsValue = kwargs(
        "Hyperparameters of rollout_selection.", SELECTIONS, switch="rollout_selection"
    )
    reward_balance: Literal["fixed", "log_transform", "uncertainty", "gradnorm", "famo", "nash", "pareto"] | None = (
        opt(
            None,
            "How to weight the advantages of each reward during training; reward_weights are the preferences. By "
            "default, advantages are computed from the weighted sum of rewards.",
        )
    )
    balance_kwargs: KwargsValue = kwargs(
        "Hyperparameters of reward_balance.",
        BALANCE_PARAMS,
        switch="reward_balance",
    )
    truncated_logprobs: Literal["exact", "softmax"] = opt(
        "exact",
        "How log-probs are computed with top_k, top_p, min_p or repetition_penalty. 'exact' uses the distribution "
        "that was sampled from, in which the kept tokens are renormalized. 'softmax' uses the whole softmax, as in "
        "TRL; policy gradients are then biased, and sampling is not corrected.",
    )

    selection_params = ParamsOf("selection_kwargs", Params)
    balance_params = ParamsOf("balance_kwargs", Params)


@dataclass(init=False, repr=False, eq=False)
class PolicyGradientOptions(TeacherOptions, ReferenceOptions, CreditOptions):
    """The loss, its entropy terms, its KL terms, and the advantages."""

    kl_estimator: KLEstimate = opt(
        "k3",
        "Estimator of the policy's KL from the reference, per token: Schulman's k1, k2 or k3, or the absolute value "
        "of k1 (abs). A + gives the same value with the gradient of k2. 'full' is the KL of the full distributions. "
        "'sequence' is exact for samples of another policy, too, and includes the effect of a token on later tokens.",
    )
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "Whether beta * KL is added to the loss or subtracted from the reward."
    )
    kl_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the KL term.",
        KL_PARAMS,
        switch="kl_part",
        label="kl_estimator",
        off="beta=0.0: there is no KL term. Set beta > 0.",
        same={"bias_correction": True},
    )
    teacher_kl_coef: Annotated[float, Ge(0)] = opt(
        0.0,
        "Weight of a second KL term, KL(policy || teacher), beside the one of the reference. Above 0 it needs a "
        "teacher, and rewards may be left out. At 0 there is no teacher.",
    )
    teacher_kl_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the KL term of the teacher.",
        {True: TeacherKLParams},
        switch="teacher_kl_coef",
        off="teacher_kl_coef=0.0: there is no teacher. Set teacher_kl_coef > 0.",
    )
    entropy_coef: Annotated[float, Ge(0)] = opt(
        0.0,
        "Weight of the entropy bonus, which is the mean entropy of a token. With use_adaptive_entropy, this is "
        "its initial weight.",
    )
    use_adaptive_entropy: bool = opt(
        False,
        "Adapt entropy_coef after each step to keep the entropy at a target. There is no bonus above the target.",
    )
    entropy_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the adaptive weight of the entropy bonus.",
        {True: EntropyParams},
        switch="use_adaptive_entropy",
    )
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = opt(
        1.0,
        "Compute the policy loss only on this fraction of the tokens of a generation batch, those with the highest "
        "entropy. A value below 1 needs one more forward pass.",
    )
    loss_type: LossType = opt(
        "dapo",
        "Loss, and how it is averaged. Five of them are PPO's clipped surrogate with different averages: the mean "
        "over sequences of token means (grpo), the mean over all tokens of the step (dapo, bnpo), the sum over tokens "
        "divided by the number of sequences * max_completion_length (dr_grpo), and the mean over sequences of token "
        "sums (luspo). For the others, see docs/losses.md.",
    )
    importance_sampling_level: ImportanceLevel = opt(
        "token",
        "Level at which the ratio is computed. 'token' has one ratio for each token. 'sequence' has one for each "
        "sequence, from its mean log-ratio (GSPO). 'sequence_token' has the same value, but each token has its own "
        "gradient (GSPO-token). 'sequence_sum' has one for each sequence, from its summed log-ratio (RLOO).",
    )
    epsilon: Annotated[float, Ge(0)] = opt(
        0.2,
        "Clip the ratio to at least 1 - epsilon. With 1 or more, there is no lower bound. With loss_type='dppo', this "
        "is how far a probability may fall, and epsilon_high is how far it may rise.",
    )
    epsilon_high: Annotated[float, Ge(0)] | None = opt(
        None, "Clip the ratio to at most 1 + epsilon_high. The default is the value of epsilon; DAPO uses 0.28."
    )
    delta: Annotated[float, Gt(0)] | None = opt(
        None,
        "Upper bound of the ratio where epsilon does not clip it, for two-sided (dual) clipping. It must be above 1 + "
        "epsilon_high. verl calls it clip_ratio_c, and cosmos-rl lower_bound_ratio.",
    )
    loss_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the loss.",
        {name: row.params for name, row in POLICY_LOSS_FACTS.items()},
        switch="loss_type",
        own_options=("epsilon", "epsilon_high", "delta"),
    )
    advantage_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the advantage estimator.",
        {name: row.params for name, row in ESTIMATOR_FACTS.items()},
        switch="estimator",
        label="advantage_estimator",
        own_options=("scale_rewards", "gamma", "lam"),
    )
    normalize_advantages: bool = opt(
        False,
        "Normalize the advantages of a generation batch to mean 0 and standard deviation 1, over its tokens if each "
        "token has its own advantage (PPO, REINFORCE++), and over its completions otherwise.",
    )
    journal_tokens: bool = opt(
        False,
        "Keep what each training pass finds of each token, for the colors of prefrl watch: its log-prob, its "
        "advantage, and its log-probs under reference and teacher. No pass is added. docs/watching.md has the size.",
        decides=False,
    )

    kl_params = ParamsOf("kl_kwargs", KLParams, if_off=True)
    teacher_kl_params = ParamsOf("teacher_kl_kwargs", TeacherKLParams, if_off=True)
    entropy_params = ParamsOf("entropy_kwargs", EntropyParams)
    loss_params = ParamsOf("loss_kwargs", PolicyLossParams)
    advantage_params = ParamsOf("advantage_kwargs", AdvantageParams)

    @property
    def kl_part(self) -> str | None:
        """The estimator of the KL term. None means there is no term."""
        return str(self.kl_estimator) if self.beta > 0 else None

    @property
    def needs_teacher(self) -> str:
        """See `TeacherOptions.needs_teacher`."""
        if not self.teacher_kl_coef:
            return ""
        return f"teacher_kl_coef={self.teacher_kl_coef} needs a teacher. Give a model with the policy's vocabulary"

    @property
    def needs_rewards(self) -> bool:
        """See `OnlineOptions.needs_rewards`. A critic has to have something to learn, too."""
        learns_values = "values" in ESTIMATOR_FACTS[self.estimator].needs
        return not self.teacher_kl_coef or (learns_values and not self.teacher_kl_params.in_reward)

    @property
    def levels(self) -> tuple[ImportanceLevel, ...]:
        """The levels of the ratio that the chosen loss supports."""
        return POLICY_LOSS_FACTS[self.loss_type].levels

    @property
    def of_tokens(self) -> bool:
        """Whether each token has its own advantage."""
        return ESTIMATOR_FACTS[self.estimator].level == "token"

    @property
    def reduction(self) -> Reduction:
        """How the loss is averaged."""
        return POLICY_LOSS_FACTS[self.loss_type].reduction

    @property
    def estimator(self) -> str:
        """The advantage estimator, by its name in `ADVANTAGES`."""
        raise NotImplementedError

    @property
    def needs_scores_first(self) -> bool:
        """Whether advantages or token selection depend on log-probs of the policy before its first update."""
        return (
            (self.kl_in == "reward" and self.beta > 0)
            or self.teacher_kl_params.in_reward
            or self.of_tokens
            or self.top_entropy_quantile < 1
            or self.loss_type in ("clip_cov", "kl_cov")
        )

    @property
    def needs_greedy(self) -> bool:
        """See `OnlineConfig.needs_greedy`."""
        return "greedy" in ESTIMATOR_FACTS[self.estimator].needs

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """See `GenerationRules.needs_whole_batch`."""
        needs = super().needs_whole_batch
        if self.normalize_advantages:
            needs["normalize_advantages=True"] = "Set it to False."
        if self.top_entropy_quantile < 1:
            needs[f"top_entropy_quantile={self.top_entropy_quantile}"] = "Set it to 1."
        if self.loss_type in ("clip_cov", "kl_cov"):
            needs[f"loss_type={self.loss_type!r}"] = "Use another loss."
        if self.bonus_has_own_count:
            bonus = f"entropy_coef={self.entropy_coef}" if self.entropy_coef else "use_adaptive_entropy=True"
            if self.reduction != "token":
                needs[f"{bonus} and loss_type={self.loss_type!r}"] = "Use loss_type='dapo', or no entropy bonus."
            else:
                needs[f"{bonus} and a selection of tokens"] = "Remove one of them."
        if scales_by_batch(self):
            needs["scale_rewards='batch'"] = "Use scale_rewards='group'."
        if normalizes_each_reward(self):
            needs["multi_objective_aggregation='normalize_then_sum'"] = (
                "Use multi_objective_aggregation='sum_then_normalize'."
            )
        if self.estimator == "gpg":
            needs["advantage_estimator='gpg'"] = "Use another estimator."
        resamples = self.rollout_selection in ("pow", "max_min", "max_random")
        given = {
            "rollout_selection": self.rollout_selection if resamples else None,
            "loss_kwargs: positive_nll_coef": self.loss_params.positive_nll_coef,
            "reward_balance": self.reward_balance,
        }
        return needs | {f"{name}={value!r}": "Remove it." for name, value in given.items() if value is not None}

    @property
    def has_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return bool(self.entropy_coef > 0 or self.use_adaptive_entropy)

    @property
    def bonus_has_own_count(self) -> bool:
        """Whether the bonus is a mean over something other than the items that the loss is divided by."""
        selects = self.top_entropy_quantile < 1 or self.loss_params.min_filter_prefix_tokens is not None
        return self.has_bonus and (selects or self.reduction != "token")

    @property
    def scores_truncated(self) -> bool:
        """See `OnlineOptions.scores_truncated`."""
        return self.truncated_logprobs == "exact"

    def validate_rewards(self, names: Sequence[str]) -> None:
        """Reject options that compare rewards if there are none, because the run learns from a teacher alone.

        Args:
            names: Those of the rewards.

        Raises:
            ConfigError: There is such an option, and no reward.
        """
        if names:
            return
        remedy = "Leave it out, or give reward_funcs."
        of_rewards = (
            "dynamic_sampling",
            "curriculum",
            "stop_without_signal",
            "reward_shaping_kwargs",
            "reward_balance",
        )
        check_unset(self, *of_rewards, because="there are no rewards", remedy=remedy)
        if self.needs_greedy:
            raise ConfigError(
                f"advantage_estimator={self.estimator!r} without rewards: it compares with the reward of the greedy "
                "completion. Use another estimator, or give reward_funcs."
            )

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        if self.teacher_kl_coef:
            self.parse_teachers()
        super().validate()
        rules = LEVEL_RULES, REFERENCE_RULES, KL_RULES, TEACHER_RULES, RATIO_RULES, HYPERPARAMETERS_RULES
        apply(self, *rules, JOURNAL_RULES)
