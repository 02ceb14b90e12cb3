"""Options of ORPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from prefrl.options.fields import opt
from prefrl.trainer.offline.config import OfflineConfig, SampleOptions

__all__ = ["ORPOConfig"]


@dataclass
class ORPOConfig(SampleOptions, OfflineConfig):
    """Options of `ORPOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    beta: Annotated[float, Gt(0)] = opt(0.1, "Weight of the odds-ratio term; lambda in the paper.")
