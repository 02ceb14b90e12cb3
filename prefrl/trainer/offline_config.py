"""Options of trainers that learn from a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from prefrl.trainer.base_config import BaseConfig, TruncationMode
from prefrl.trainer.options import opt

__all__ = ["OfflineConfig"]


@dataclass
class OfflineConfig(BaseConfig):
    """Options of trainers that learn from a fixed dataset."""

    max_length: Annotated[int, Ge(2)] | None = opt(1024, "Longest sequence in tokens; None: any length.")
    truncation_mode: TruncationMode = opt(
        "keep_start", "What happens to a longer sequence: keep its start, keep its end, or stop with an error."
    )
