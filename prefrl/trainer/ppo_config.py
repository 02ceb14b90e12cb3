"""Options of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, opt
from prefrl.trainer.online.policy_gradient_config import PolicyGradientConfig
from prefrl.trainer.online.policy_options import KLEstimate

__all__ = ["PPOConfig"]


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
    critic_warmup: Annotated[int, Ge(0)] = opt(0, "Optimizer steps at the start that train only the critic.")
    vf_coef: Annotated[float, Gt(0)] = opt(0.1, "Weight of the value loss.")
    cliprange_value: Annotated[float, Gt(0)] | None = opt(
        0.2, "Value clipping: how far values may move from those before the first update; None: no clipping."
    )
    detach_trunk: bool = opt(False, "head: the value loss trains only the head; no gradient flows into the policy.")
    num_generations: Annotated[int, Ge(1)] = opt(1, "Completions per prompt; the critic is the baseline.")
    num_iterations: Annotated[int, Ge(1)] = opt(4, "PPO epochs: number of passes over each generation batch.")
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

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        if self.critic == "model":
            check_no_effect(
                name="detach_trunk",
                value=self.detach_trunk,
                unset=False,
                because="critic='model' shares nothing with the policy",
                remedy="Use critic='head'.",
            )
        if 0 < self.max_steps <= self.critic_warmup:
            raise ConfigError(
                f"critic_warmup={self.critic_warmup}: must be below max_steps={self.max_steps}, or the policy never "
                "learns"
            )

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return "gae"
