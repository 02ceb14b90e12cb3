"""Options of GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.options.flat_names import flat_names
from prefrl.options.policy_rules import GROUP_RULES, name_scale
from prefrl.options.rules import apply
from prefrl.trainer.grpo_presets import PRESETS, combined
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
        return cls(**combined(PRESETS[name], options, flat_names(cls)))

    def take_other_forms(self) -> None:
        """See `BaseConfig.take_other_forms`: rewards scaled True means by "group", False "none"."""
        super().take_other_forms()
        name_scale(self)

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, GROUP_RULES)

    @property
    def estimator(self) -> str:
        """See `PolicyGradientConfig.estimator`."""
        return self.advantage_estimator
