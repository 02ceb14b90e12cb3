"""Options of GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from prefrl.errors import ConfigError
from prefrl.losses.advantage.estimators import GrpoParams
from prefrl.options.fields import json_mapping, opt
from prefrl.trainer.grpo_presets import PRESETS
from prefrl.trainer.online.policy_gradient_config import GroupOptions, PolicyGradientConfig

__all__ = ["GRPOConfig"]


@dataclass
class GRPOConfig(GroupOptions, PolicyGradientConfig):
    """Options of `GRPOTrainer`."""

    advantage_estimator: Literal[
        "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk", "maxrl", "optimal_token_baseline"
    ] = opt("grpo", "How advantages are computed from the rewards of a group; see docs/losses.md.")

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """A config with the options of a paper's algorithm; your own options, and keys of mappings, take precedence.

        Args:
            name: A key of `PRESETS`: "deepseekmath", "dr_grpo", "dapo", "gspo", "cispo", ...
            options: Any options of the config.

        Raises:
            ConfigError: There is no preset of this name, or the options cannot be combined.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset {name!r}: must be one of {', '.join(map(repr, PRESETS))}")
        return cls(**_combined(cls, PRESETS[name].options, options))

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        if isinstance(self.scale_rewards, bool):  # also accepted: True means "group", False "none"
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().validate()
        self._validate_estimator()
        if not self._normalizes_each_reward:
            return
        if self.shaping_params.has_effect or self.kl_in == "reward":
            raise ConfigError(
                "multi_objective_aggregation='normalize_then_sum' normalizes each reward, but kl_in='reward' and "
                "reward_shaping_kwargs change the total. Use 'sum_then_normalize', or remove these."
            )
        if self.reward_balance is not None:
            raise ConfigError(
                f"multi_objective_aggregation='normalize_then_sum' with reward_balance={self.reward_balance!r}: both "
                "say how rewards are combined. Remove one of them."
            )

    @property
    def _normalizes_each_reward(self) -> bool:
        params = self.advantage_params
        return isinstance(params, GrpoParams) and params.multi_objective_aggregation == "normalize_then_sum"

    def _validate_estimator(self) -> None:
        if self.num_generations < 2 and self.advantage_estimator != "remax":
            raise ConfigError(
                f"num_generations={self.num_generations}: group advantages need at least 2 completions of a prompt. "
                "Set num_generations>=2."
            )
        if self.advantage_estimator == "remax" and self.generation_mode != "sync":
            raise ConfigError(
                f"generation_mode={self.generation_mode!r} with advantage_estimator='remax': its greedy completions "
                "are requested together with the others. Use generation_mode='sync'."
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
        if self._normalizes_each_reward:
            needs["multi_objective_aggregation='normalize_then_sum'"] = (
                "Use multi_objective_aggregation='sum_then_normalize'."
            )
        if self.advantage_estimator == "gpg":
            needs["advantage_estimator='gpg'"] = "Use another estimator."
        return needs


def _combined(cls: type[GRPOConfig], preset: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both; the user's take precedence, for keys of mappings as well."""
    combined = {**preset, **options}
    for option, of_preset in preset.items():
        if isinstance(of_preset, Mapping):
            given = options.get(option) or {}
            keys = json_mapping(given, option) if isinstance(given, str) else given
            by_name = {place.key for name, place in cls.flat_names.items() if name in options}
            combined[option] = {key: value for key, value in of_preset.items() if key not in by_name} | keys
    return combined
