"""Options of the online algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import apply, flat, opt, parse_json
from prefrl.options.generation_rules import LEAST_TEMPERATURE
from prefrl.options.online import OnlineOptions
from prefrl.options.params import Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.policy import ImportanceLevel, LossType
from prefrl.options.policy_gradient import KLEstimate, PolicyGradientOptions
from prefrl.options.policy_rules import (
    CRITIC_RULES,
    DISTILLATION_RULES,
    GROUP_RULES,
    PAIRS_RULES,
    REINFORCE_PLUS_PLUS_RULES,
    RLOO_RULES,
)
from prefrl.options.preference import REFERENCE_RULES, ReferenceOptions
from prefrl.options.schedule import takes_warmup
from prefrl.options.types import Length, NumSamples
from prefrl.options.unlisted import PAIRS_NAMES_RULES, PairsNames


@dataclass(init=False, repr=False, eq=False)
class GRPOOptions(PolicyGradientOptions):
    """Options of GRPO."""

    scale_rewards: Literal["group", "batch", "none", True, False] = opt(
        "group",
        "Divide centered rewards by the standard deviation of their group ('group') or of the whole batch ('batch'), "
        "or leave them unscaled ('none', as in Dr. GRPO). True means 'group', and False means 'none'.",
    )
    advantage_estimator: Literal[
        "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk", "maxrl", "optimal_token_baseline"
    ] = opt("grpo", "How advantages are computed from the rewards of a group; see docs/losses.md.")

    def take_other_forms(self) -> None:
        """See `BaseOptions.take_other_forms`: rewards scaled True means by "group", False "none"."""
        super().take_other_forms()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, GROUP_RULES)

    @property
    def estimator(self) -> str:
        """See `PolicyGradientOptions.estimator`."""
        return self.advantage_estimator


@dataclass(init=False, repr=False, eq=False)
class RLOOOptions(PolicyGradientOptions):
    """Options of RLOO: shared ones with other defaults."""

    num_generations: NumSamples = opt(2, "Completions per prompt, at least 2.")
    beta: Annotated[float, Ge(0)] = opt(
        0.05, "Weight of the KL term. At 0 there is no KL term, and no reference model is loaded."
    )
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or, summed over a completion, subtracted from its reward."
    )
    loss_type: LossType = opt(
        "grpo", "Loss, and how it is averaged. 'grpo' is the clipped surrogate, averaged over sequences."
    )
    importance_sampling_level: ImportanceLevel = opt(
        "sequence_sum",
        "Level at which the ratio is computed. 'sequence_sum' takes the ratio of the probabilities of whole "
        "completions.",
    )

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        apply(self, RLOO_RULES)
        super().validate()

    @property
    def estimator(self) -> str:
        """See `PolicyGradientOptions.estimator`."""
        return "rloo"


@dataclass(init=False, repr=False, eq=False)
class ReinforcePlusPlusOptions(PolicyGradientOptions):
    """Options of REINFORCE++, and shared ones with other defaults."""

    advantage_estimator: Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"] = opt(
        "reinforce_plus_plus",
        "'reinforce_plus_plus' sums the discounted rewards from each token on. 'reinforce_plus_plus_baseline' "
        "subtracts the mean reward of the prompt's completions from the reward.",
    )
    gamma: Annotated[float, Gt(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")
    num_generations: NumSamples = opt(1, "Completions per prompt. A baseline needs at least 2.")
    normalize_advantages: bool = opt(
        True, "Normalize the advantages of all tokens of a generation batch to mean 0 and standard deviation 1."
    )
    beta: Annotated[float, Ge(0)] = opt(
        0.01, "Weight of the KL term. At 0 there is no KL term, and no reference model is loaded."
    )
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or subtracted from the reward."
    )

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        apply(self, REINFORCE_PLUS_PLUS_RULES)
        super().validate()

    @property
    def estimator(self) -> str:
        """See `PolicyGradientOptions.estimator`."""
        return self.advantage_estimator


@hyperparameters
class CriticOptimizer(Params):
    """How optimizer and schedule of the critic differ from those of the policy. None means they do not."""

    warmup_steps: Annotated[float, Ge(0)] | None = opt(
        None, "Number of warm-up steps. A value below 1 is a fraction of all steps."
    )
    weight_decay: Annotated[float, Ge(0)] | None = opt(None, "Weight decay.")
    adam_beta1: Annotated[float, Ge(0), Lt(1)] | None = opt(None, "Decay rate of Adam's first moment.")
    adam_beta2: Annotated[float, Ge(0), Lt(1)] | None = opt(None, "Decay rate of Adam's second moment.")
    adam_epsilon: Annotated[float, Ge(0)] | None = opt(None, "Constant added to Adam's denominator.")
    max_grad_norm: Annotated[float, Gt(0)] | None = opt(None, "Maximum norm of the critic's gradients.")


@dataclass(init=False, repr=False, eq=False)
class PPOOptions(PolicyGradientOptions):
    """Options of PPO, and shared ones with other defaults."""

    gamma: Annotated[float, Gt(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")
    lam: Annotated[float, Ge(0), Le(1)] = opt(
        0.95, "Lambda of generalized advantage estimation. At 1 the critic is only a baseline and adds no bias."
    )
    critic: Literal["head", "model"] | None = opt(
        None,
        "'head' puts a value head on the policy's hidden states; 'model' trains value_model, or a copy of the policy, "
        "as a separate critic. The default is 'model' if value_model is given, and 'head' otherwise.",
    )
    value_model_name_or_path: str | None = opt(
        None,
        "Sequence classifier with one output, such as a reward model, that becomes the critic: a name on the Hub or a "
        "folder. The argument value_model of the trainer takes an instance, too.",
    )
    critic_learning_rate: Annotated[float, Gt(0)] = opt(1e-5, "Learning rate of the critic, with the same schedule.")
    critic_optim_kwargs: dict[str, Any] | str | None = kwargs(
        "Optimizer and schedule options that differ for the critic, in addition to critic_learning_rate.",
        CriticOptimizer,
    )
    critic_warmup: Annotated[int, Ge(0)] = opt(0, "Optimizer steps at the start that train only the critic.")
    vf_coef: Annotated[float, Gt(0)] = opt(0.1, "Weight of the value loss.")
    cliprange_value: Annotated[float, Gt(0)] | None = opt(
        0.2,
        "How far values may move from those before the first update (value clipping). None turns value clipping off.",
    )
    detach_trunk: bool = opt(
        False,
        "With critic='head', train only the head on the value loss, so that no gradient of it flows into the policy.",
    )
    num_generations: NumSamples = opt(1, "Completions per prompt. One is enough, because the critic is the baseline.")
    num_iterations: Annotated[int, Ge(1), Le(10**6)] = opt(
        4, "Number of passes over each generation batch (PPO epochs)."
    )
    normalize_advantages: bool = opt(
        True, "Normalize the advantages of all tokens of a generation batch to mean 0 and standard deviation 1."
    )
    beta: Annotated[float, Ge(0)] = opt(
        0.05, "Weight of the KL term. At 0 there is no KL term, and no reference model is loaded."
    )
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or subtracted from the reward."
    )

    critic_params = ParamsOf("critic_optim_kwargs", CriticOptimizer)

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        super().validate()
        apply(self, CRITIC_RULES)

    @property
    def set_on_gradients(self) -> list[str]:
        """See `OptimizerOptions`."""
        is_set = self.critic_params.max_grad_norm is not None
        return [*super().set_on_gradients, *["critic_optim_kwargs: max_grad_norm"] * is_set]

    @property
    def has_own_schedule(self) -> bool:
        """See `ScheduleOptions`; a warm-up of the critic is more than schedules of transformers have."""
        has_warmup = self.critic_params.warmup_steps is not None and takes_warmup(self)
        return super().has_own_schedule or has_warmup

    @property
    def depends_on_length(self) -> bool:
        """See `ScheduleOptions`."""
        is_share = 0 < (self.critic_params.warmup_steps or 0) < 1
        return super().depends_on_length or (is_share and self.lr_decay_steps is None)

    @property
    def estimator(self) -> str:
        """See `PolicyGradientOptions.estimator`."""
        return "gae"


@dataclass(init=False, repr=False, eq=False)
class OnlineDPOOptions(PairsNames, ReferenceOptions, OnlineOptions):
    """Options of online DPO, and shared ones with other defaults."""

    loss_type: Literal["sigmoid", "ipo"] = opt("sigmoid", "Use the loss of DPO ('sigmoid') or of IPO ('ipo').")
    beta: Annotated[float, Gt(0)] = opt(
        0.1,
        "Implicit rewards are beta * log(policy / reference), so a larger beta keeps the policy closer to the "
        "reference.",
    )
    num_generations: NumSamples = opt(
        2, "Completions per prompt, at least 2. The best and the worst of them form a pair."
    )

    def take_other_forms(self) -> None:
        """See `BaseOptions.take_other_forms`: in TRL, beta may be a list with a number for each epoch."""
        super().take_other_forms()
        if isinstance(self.beta, list) and len(self.beta) == 1:
            self.beta = self.beta[0]

    @property
    def rows_per_micro_batch(self) -> int:
        """All completions of `per_device_train_batch_size` prompts, as in TRL."""
        return super().rows_per_micro_batch * self.num_generations

    @property
    def prompts_per_evaluation_batch(self: Any) -> int:
        """`per_device_eval_batch_size` counts prompts, too."""
        return int(self.per_device_eval_batch_size)

    @property
    def corrects_sampling(self) -> bool:
        """False: pairs are trained on like those of a dataset, whichever policy sampled them."""
        return False

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        apply(self, PAIRS_RULES, PAIRS_NAMES_RULES)
        super().validate()
        apply(self, REFERENCE_RULES)


@dataclass(init=False, repr=False, eq=False)
class DistillationOptions(OnlineOptions):
    """Options of distillation, and shared ones with other defaults."""

    best_metric: ClassVar[str] = "loss"
    learns_from_rewards: ClassVar[bool] = False
    spike_metrics: ClassVar[tuple[str, ...]] = ("grad_norm", "divergence")

    lmbda: float | None = flat("on_policy_fraction")  # of GKD
    teacher_model_revision: str | None = flat("teacher_model_init_kwargs", "revision")

    teacher_model_name_or_path: str | None = opt(
        None,
        "Model that teaches, with the same vocabulary: a name on the Hub or a folder. The argument teacher_model of "
        "the trainer takes an instance, too.",
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments of from_pretrained for a teacher that is given by name. By default, those of model_init_kwargs. On "
        "the command line, give them as JSON.",
    )
    beta: Annotated[float, Ge(0), Le(1)] = opt(
        1.0,
        "Divergence of the student from the teacher at each token: 1 is the reverse KL, KL(student || teacher), 0 is "
        "the forward KL, KL(teacher || student), and values between them are generalized Jensen-Shannon divergences.",
    )
    later_tokens: bool = opt(
        False,
        "Also give each token credit for the divergence of later tokens, relative to the prompt's other completions. "
        "With beta=1, this is the exact gradient of the KL of whole completions. Without it, as in TRL and GKD, each "
        "token counts by itself.",
    )
    on_policy_fraction: Annotated[float, Ge(0), Le(1)] = opt(
        1.0,
        "Probability that a prompt is completed by the student. Otherwise, the completion in the dataset's column "
        "completion is learned from. GKD calls this lambda.",
    )
    num_generations: NumSamples = opt(1, "Completions per prompt.")
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE), Le(100)] = opt(
        1.0, "Sampling temperature; the distributions of student and teacher are compared at the same temperature."
    )
    max_completion_length: Length | None = opt(
        512, "Maximum completion length in tokens. None means what max_prompt_length leaves of the model's context."
    )

    @property
    def corrects_sampling(self) -> bool:
        """False: prefixes may come from any policy, and later_tokens has importance weights of its own."""
        return False

    @property
    def takes_old_samples(self) -> bool:
        """See `RolloutOptions.takes_old_samples`."""
        return not self.later_tokens

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        parse_json(self, "teacher_model_init_kwargs")
        apply(self, DISTILLATION_RULES)
        super().validate()
