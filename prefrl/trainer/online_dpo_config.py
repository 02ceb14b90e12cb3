"""Options of `OnlineDPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.algorithms import OnlineDPOOptions
from prefrl.trainer.online.config import OnlineConfig

__all__ = ["OnlineDPOConfig"]


@dataclass
class OnlineDPOConfig(OnlineDPOOptions, OnlineConfig):
    """Options of `OnlineDPOTrainer`."""
