"""Options of `BCOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import BCOOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["BCOConfig"]


@dataclass
class BCOConfig(BCOOptions, OfflineConfig):
    """Options of `BCOTrainer`."""
