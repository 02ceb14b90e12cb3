"""Options of `PPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.algorithms import PPOOptions
from prefrl.trainer.online.config import PolicyGradientConfig

__all__ = ["PPOConfig"]


@dataclass
class PPOConfig(PPOOptions, PolicyGradientConfig):
    """Options of `PPOTrainer`."""
