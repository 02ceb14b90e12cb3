"""Options of `RewardTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import RewardModelOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["RewardConfig"]


@dataclass
class RewardConfig(RewardModelOptions, OfflineConfig):
    """Options of `RewardTrainer`."""
