"""Options of `DPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import DPOOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["DPOConfig"]


@dataclass
class DPOConfig(DPOOptions, OfflineConfig):
    """Options of `DPOTrainer`."""
