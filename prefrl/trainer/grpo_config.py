"""Options of GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from annotated_types import Gt

from prefrl.errors import ConfigError
from prefrl.losses.advantage.estimators import ADVANTAGES
from prefrl.trainer.base.options import opt
from prefrl.trainer.grpo_presets import PRESETS
from prefrl.trainer.online.policy_gradient_config import GroupOptions, PolicyGradientConfig
from prefrl.trainer.online.rollout_options import refuse_unless

__all__ = ["GRPOConfig"]


@dataclass
class GRPOConfig(GroupOptions, PolicyGradientConfig):
    """Options of `GRPOTrainer`."""

    advantage_estimator: Literal[
        "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk", "maxrl", "optimal_token_baseline"
    ] = opt("grpo", "How advantages are computed from the rewards of a group; see docs/losses.md.")

    f_norm: Annotated[float, Gt(0)] = opt(1.0, "gpg: advantages are divided by this.")
    zero_tail: bool = opt(
        True, "optimal_token_baseline: no baseline at positions that only one completion of a prompt reaches."
    )

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """A config with the options of a paper's algorithm; your own options take precedence.

        Args:
            name: A key of `PRESETS`: "deepseekmath", "dr_grpo", "dapo", "gspo", "cispo", ...
            options: Any options of the config.

        Raises:
            ConfigError: There is no preset of this name, or the options cannot be combined.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset {name!r}: must be one of {', '.join(map(repr, PRESETS))}")
        return cls(**{**PRESETS[name].options, **options})

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        if isinstance(self.scale_rewards, bool):  # also accepted: True means "group", False "none"
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().validate()
        self._validate_estimator()
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            self.shapes_rewards or self.kl_in == "reward"
        ):
            raise ConfigError(
                "multi_objective_aggregation='normalize_then_sum' normalizes each reward, and kl_in='reward', "
                "reward_clip_range, missing_eos_penalty, normalize_rewards and stop_properly_penalty_coef change "
                "their total. Use 'sum_then_normalize', or leave these out."
            )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.reward_balance is not None:
            raise ConfigError(
                f"multi_objective_aggregation='normalize_then_sum' with reward_balance={self.reward_balance!r}: both "
                "say how rewards are combined. Remove one of them."
            )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            raise ConfigError(
                f"scale_rewards={self.scale_rewards!r} has no effect with "
                "multi_objective_aggregation='normalize_then_sum', which normalizes by group and then by batch. Use "
                "scale_rewards='group'."
            )

    def _validate_estimator(self) -> None:
        if self.num_generations < 2 and self.advantage_estimator != "remax":
            raise ConfigError(
                f"num_generations={self.num_generations}: group advantages need at least 2 completions of a prompt. "
                "Set num_generations>=2."
            )
        read = {name: ADVANTAGES[name].hyperparameters for name in ADVANTAGES}
        for name in ("scale_rewards", "multi_objective_aggregation", "f_norm", "zero_tail"):
            if name not in read[self.advantage_estimator]:
                users = ", ".join(repr(estimator) for estimator, names in read.items() if name in names)
                remedy = f"It goes with advantage_estimator {users}."
                refuse_unless(self, name, switch="advantage_estimator", remedy=remedy)
        if self.advantage_estimator == "remax" and self.generation_mode != "sync":
            raise ConfigError(
                f"generation_mode={self.generation_mode!r} with advantage_estimator='remax': its greedy completions "
                "are asked for together with the others. Use generation_mode='sync'."
            )

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return self.advantage_estimator

    @property
    def needs_whole_batch(self) -> dict[str, str]:
        """See `OnlineConfig.needs_whole_batch`."""
        needs = super().needs_whole_batch
        if self.scale_rewards == "batch":
            needs["scale_rewards='batch'"] = "Use scale_rewards='group'."
        if self.multi_objective_aggregation == "normalize_then_sum":
            needs["multi_objective_aggregation='normalize_then_sum'"] = (
                "Use multi_objective_aggregation='sum_then_normalize'."
            )
        if self.advantage_estimator == "gpg":
            needs["advantage_estimator='gpg'"] = "Use another estimator."
        return needs
