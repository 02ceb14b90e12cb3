"""Options of `GRPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from prefrl.errors import ConfigError
from prefrl.options.algorithms import PRESETS, GRPOOptions, combined
from prefrl.options.fields import flat_names
from prefrl.trainer.online.config import PolicyGradientConfig

__all__ = ["GRPOConfig"]


@dataclass
class GRPOConfig(GRPOOptions, PolicyGradientConfig):
    """Options of `GRPOTrainer`."""

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
