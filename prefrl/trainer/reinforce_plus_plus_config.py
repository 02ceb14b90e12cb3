"""Options of `ReinforcePlusPlusTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.algorithms import ReinforcePlusPlusOptions
from prefrl.trainer.online.config import PolicyGradientConfig

__all__ = ["ReinforcePlusPlusConfig"]


@dataclass
class ReinforcePlusPlusConfig(ReinforcePlusPlusOptions, PolicyGradientConfig):
    """Options of `ReinforcePlusPlusTrainer`."""
