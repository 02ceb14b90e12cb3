"""Options of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.fields import opt
from prefrl.options.kwargs import ParamsOf, kwargs
from prefrl.options.params import Params
from prefrl.options.policy_rules import CRITIC_RULES
from prefrl.options.rules import apply
from prefrl.options.types import NumSamples
from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
from prefrl.trainer.online.policy_options import KLEstimate

__all__ = ["CriticOptimizer", "PPOConfig"]


@dataclass(frozen=True)
class CriticOptimizer(Params):
    """How optimizer and schedule of the critic differ from those of the policy. None: they do not."""

    warmup_steps: Annotated[float, Ge(0)] | None = opt(
        None, "Steps in which the learning rate rises; below 1: a share of all steps."
    )
    weight_decay: Annotated[float, Ge(0)] | None = opt(None, "Weight decay.")
    adam_beta1: Annotated[float, Ge(0), Lt(1)] | None = opt(None, "Decay rate of the first moment.")
    adam_beta2: Annotated[float, Ge(0), Lt(1)] | None = opt(None, "Decay rate of the second moment.")
    adam_epsilon: Annotated[float, Ge(0)] | None = opt(None, "Term of the denominator.")
    max_grad_norm: Annotated[float, Gt(0)] | None = opt(None, "Norm that the critic's gradients are clipped to.")


@dataclass
class PPOConfig(PolicyGradientConfig):
    """Options of `PPOTrainer`, and shared options with other defaults."""

    gamma: Annotated[float, Gt(0), Le(1)] = opt(1.0, "Discount factor of rewards, per token.")
    lam: Annotated[float, Ge(0), Le(1)] = opt(
        0.95, "Lambda of generalized advantage estimation; 1: the critic is only a baseline and adds no bias."
    )
    critic: Literal["head", "model"] | None = opt(
        None,
        "head: a head on the policy's hidden states. model: value_model, or a copy of the policy. None: model with "
        "value_model, head without it.",
    )
    critic_learning_rate: Annotated[float, Gt(0)] = opt(1e-5, "Learning rate of the critic, with the same schedule.")
    critic_optim_kwargs: dict[str, Any] | str | None = kwargs(
        "Optimizer and schedule options that differ for the critic, in addition to critic_learning_rate.",
        CriticOptimizer,
    )
    critic_warmup: Annotated[int, Ge(0)] = opt(0, "Optimizer steps at the start that train only the critic.")
    vf_coef: Annotated[float, Gt(0)] = opt(0.1, "Weight of the value loss.")
    cliprange_value: Annotated[float, Gt(0)] | None = opt(
        0.2, "Value clipping: how far values may move from those before the first update; None: no clipping."
    )
    detach_trunk: bool = opt(False, "head: the value loss trains only the head; no gradient flows into the policy.")
    num_generations: NumSamples = opt(1, "Completions per prompt; the critic is the baseline.")
    num_iterations: Annotated[int, Ge(1), Le(10**6)] = opt(
        4, "PPO epochs: number of passes over each generation batch."
    )
    normalize_advantages: bool = opt(
        True, "Normalize the advantages of all tokens of a generation batch to mean 0 and standard deviation 1."
    )
    beta: Annotated[float, Ge(0)] = opt(0.05, "Weight of the KL term; 0: no KL term and no reference model.")
    kl_estimator: KLEstimate = opt(
        "k1", "Estimator of the policy's KL from the reference, per token; with kl_in='reward', it has no gradient."
    )
    kl_in: Literal["loss", "reward"] = opt(
        "reward", "Whether beta * KL is added to the loss or subtracted from the reward."
    )

    critic_params = ParamsOf("critic_optim_kwargs", CriticOptimizer)

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
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
        has_warmup = self.critic_params.warmup_steps is not None and self.takes_warmup
        return super().has_own_schedule or has_warmup

    @property
    def depends_on_length(self) -> bool:
        """See `ScheduleOptions`."""
        is_share = 0 < (self.critic_params.warmup_steps or 0) < 1
        return super().depends_on_length or (is_share and self.lr_decay_steps is None)

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return "gae"
