"""Options of `RLOOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.algorithms import RLOOOptions
from prefrl.trainer.online.config import PolicyGradientConfig

__all__ = ["RLOOConfig"]


@dataclass
class RLOOConfig(RLOOOptions, PolicyGradientConfig):
    """Options of `RLOOTrainer`."""
