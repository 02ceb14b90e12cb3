"""Options of `SFTTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import SFTOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["SFTConfig"]


@dataclass
class SFTConfig(SFTOptions, OfflineConfig):
    """Options of `SFTTrainer`."""
