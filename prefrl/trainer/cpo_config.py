"""Options of `CPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import CPOOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["CPOConfig"]


@dataclass
class CPOConfig(CPOOptions, OfflineConfig):
    """Options of `CPOTrainer`."""
