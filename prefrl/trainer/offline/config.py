"""Options of trainers that learn from a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass

from prefrl.options.offline import OfflineOptions
from prefrl.trainer.config import BaseConfig

__all__ = ["OfflineConfig"]


@dataclass
class OfflineConfig(OfflineOptions, BaseConfig):
    """Options of trainers that learn from a fixed dataset."""
