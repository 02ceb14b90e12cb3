"""Options of `KTOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import KTOOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["KTOConfig"]


@dataclass
class KTOConfig(KTOOptions, OfflineConfig):
    """Options of `KTOTrainer`."""
