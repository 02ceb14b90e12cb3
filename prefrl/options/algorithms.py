"""Options of the online algorithms, and presets of GRPO: the options of published algorithms, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.errors import ConfigError
from prefrl.options.fields import FlatName, apply, flat, json_mapping, opt
from prefrl.options.online import OnlineOptions
from prefrl.options.params import Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.policy import ImportanceLevel, KLEstimate, LossType
from prefrl.options.policy_gradient import PolicyGradientOptions
from prefrl.options.policy_rules import (
    CRITIC_RULES,
    GROUP_RULES,
    PAIRS_RULES,
    REINFORCE_PLUS_PLUS_RULES,
    RLOO_RULES,
)
from prefrl.options.preference import REFERENCE_RULES, ReferenceOptions
from prefrl.options.schedule import takes_warmup
from prefrl.options.types import NumSamples


@dataclass(init=False, repr=False, eq=False)
class GRPOOptions(PolicyGradientOptions):
    """Options of GRPO."""

    scale_rewards: Literal["group", "batch", "none", True, False] = opt(
        "group",
        "Divide centered rewards by the standard deviation of their group or batch, or by nothing. 'none' is used in "
        "Dr. GRPO. True means 'group', and False means 'none'.",
    )
    advantage_estimator: Literal[
        "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk", "maxrl", "optimal_token_baseline"
    ] = opt("grpo", "How advantages are computed from rewards. See docs/losses.md.")

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
class OnlineDPOOptions(ReferenceOptions, OnlineOptions):
    """Options of online DPO, and shared ones with other defaults."""

    # Names of TRL.
    max_new_tokens: int | None = flat("max_completion_length")
    max_length: int | None = flat()
    reward_model_path: str | None = flat()

    loss_type: Literal["sigmoid", "ipo"] = opt("sigmoid", "Use the loss of DPO ('sigmoid') or of IPO ('ipo').")
    beta: Annotated[float, Gt(0)] = opt(
        0.1,
        "Implicit rewards are beta * log(policy / reference). A larger beta keeps the policy closer to the reference.",
    )
    num_generations: NumSamples = opt(
        2, "Completions per prompt, at least 2. The best and the worst of them form a pair."
    )

    def take_other_forms(self) -> None:
        """See `BaseOptions.take_other_forms`: in TRL, beta may be a list with a number for each epoch."""
        super().take_other_forms()
        if isinstance(self.beta, list):
            if len(self.beta) != 1:
                raise ConfigError(
                    f"beta={self.beta}: must be one number for all epochs. Train each epoch as a run of its own, with "
                    "its own beta, from the model of the one before."
                )
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
        apply(self, PAIRS_RULES)
        self._bound_prompts()
        super().validate()
        apply(self, REFERENCE_RULES)

    def _bound_prompts(self) -> None:
        """Set the bound of prompts to what TRL's bound of prompt and completion together leaves, if it is lower."""
        if self.max_length is not None and self.max_completion_length is not None:
            left = self.max_length - self.max_completion_length
            self.max_prompt_length = left if self.max_prompt_length is None else min(self.max_prompt_length, left)
            self.max_length = None


@dataclass(frozen=True, slots=True)
class Preset:
    """Options that turn GRPO into the algorithm of a paper. Learning rates are left to the user; so are batch sizes,
    but see `combined`.
    """

    options: Mapping[str, Any]
    source: str
    note: str = ""  # what else the paper does, or leaves open


_DEFAULT_ROWS = 8  # of per_device_train_batch_size
# A user who sets one of these decides how many completions a step has.
_SIZES = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "effective_batch_size",
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
}


def _preset(source: str, note: str = "", **options: Any) -> Preset:
    # Sample from the full distribution, as the papers do and as importance ratios require.
    return Preset(MappingProxyType({"temperature": 1.0, "top_p": 1.0, "top_k": None, **options}), source, note)


PRESETS: dict[str, Preset] = {
    "deepseekmath": _preset(
        "Shao et al. 2024, arXiv 2402.03300",
        "One update for each generation.",
        loss_type="grpo",
        scale_rewards="group",
        beta=0.04,
        num_generations=64,
    ),
    "dr_grpo": _preset(
        "Liu et al. 2025, arXiv 2503.20783",
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
    ),
    "dapo": _preset(
        "Yu et al. 2025, arXiv 2503.14476",
        "Its penalty for overlong completions is the reward prefrl.rewards.get_soft_overlong_punishment.",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        beta=0.0,
        dynamic_sampling=True,
        num_generations=16,
    ),
    "gspo": _preset(
        "Zheng et al. 2025, arXiv 2507.18071",
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "gspo_token": _preset(
        "Zheng et al. 2025, arXiv 2507.18071, section 4.3",
        loss_type="grpo",
        importance_sampling_level="sequence_token",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "cispo": _preset(
        "MiniMax 2025, arXiv 2506.13585",
        "The paper gives no upper bound; 4 is a common one.",
        loss_type="cispo",
        epsilon=1.0,
        epsilon_high=4.0,
        beta=0.0,
    ),
    "sapo": _preset("Gao et al. 2025, arXiv 2511.20347", loss_type="sapo", beta=0.0),
    "gmpo": _preset(
        "Zhao et al. 2025, arXiv 2507.20673",
        "Bounds of the log-ratio, as in the paper.",
        loss_type="gmpo",
        epsilon=0.4,
        epsilon_high=0.4,
        beta=0.0,
    ),
    "gpg": _preset("Chu et al. 2025, arXiv 2504.02546", loss_type="gpg", advantage_estimator="gpg", beta=0.0),
    "opo": _preset("Hao et al. 2025, arXiv 2505.23585", loss_type="dapo", advantage_estimator="opo", beta=0.0),
    "maxrl": _preset("Tajwar et al. 2026, arXiv 2602.02710", loss_type="dapo", advantage_estimator="maxrl", beta=0.0),
    "remax": _preset(
        "Li et al. 2023, arXiv 2310.10505",
        "One sampled completion of each prompt, in addition to the greedy one.",
        loss_type="reinforce",
        advantage_estimator="remax",
        num_generations=1,
        kl_in="reward",
        kl_estimator="k1",
        beta=0.01,
    ),
    "vespo": _preset("Shen et al. 2026, arXiv 2602.10693", loss_type="vespo", beta=0.0),
    "luspo": _preset(
        "LUSPO 2026, arXiv 2602.05261",
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "clip_cov": _preset("Cui et al. 2025, arXiv 2505.22617", loss_type="clip_cov", beta=0.0),
    "kl_cov": _preset("Cui et al. 2025, arXiv 2505.22617", loss_type="kl_cov", beta=0.0),
    "high_entropy_tokens": _preset(
        "Wang et al. 2025, arXiv 2506.01939",
        "DAPO on the 20 % of the tokens that have the highest entropy.",
        loss_type="dapo",
        epsilon_high=0.28,
        top_entropy_quantile=0.2,
        beta=0.0,
        dynamic_sampling=True,
    ),
    "deepseek_v32": _preset(
        "DeepSeek-AI 2025, arXiv 2512.02556",
        "The paper gives neither beta nor the threshold; these are ours.",
        loss_type="grpo",
        beta=0.04,
        kl_kwargs={"bias_correction": True},
        loss_kwargs={"off_policy_mask_threshold": 1.0},
    ),
    "pods": _preset(
        "Xu et al. 2025, arXiv 2504.13818",
        loss_type="grpo",
        num_generations=16,
        rollout_selection="max_variance",
        selection_kwargs={"num_selected": 4},
        beta=0.0,
    ),
}


def combined(preset: Preset, options: Mapping[str, Any], flat_names: Mapping[str, FlatName]) -> dict[str, Any]:
    """The options of a preset and the user's, which take precedence, for keys of mappings as well.

    If the user sets no size, a step has whole groups of the preset: of 16 completions in two micro-batches, say.

    Args:
        preset: The preset.
        options: The user's.
        flat_names: Keywords that set keys of mappings.
    """
    both = {**preset.options, **options}
    size = preset.options.get("num_generations", 1)
    if size > 1 and _SIZES.isdisjoint(options):
        both["gradient_accumulation_steps"] = size // gcd(size, _DEFAULT_ROWS)
    for option, of_preset in preset.options.items():
        if isinstance(of_preset, Mapping):
            given = options.get(option) or {}
            keys = json_mapping(given, option) if isinstance(given, str) else given
            by_name = {place.key for name, place in flat_names.items() if name in options}
            both[option] = {key: value for key, value in of_preset.items() if key not in by_name} | keys
    return both
