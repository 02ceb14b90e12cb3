"""Options of `ORPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import ORPOOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["ORPOConfig"]


@dataclass
class ORPOConfig(ORPOOptions, OfflineConfig):
    """Options of `ORPOTrainer`."""
