"""Options of BCO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from prefrl.options.fields import opt
from prefrl.options.offline_rules import DENSITY_RATIOS_RULES
from prefrl.options.rules import apply
from prefrl.trainer.base.options.reference import PRECOMPUTED_REFERENCE_RULES, REFERENCE_RULES, OfflineReferenceOptions
from prefrl.trainer.offline.config import OfflineConfig, SampleOptions

__all__ = ["BCOConfig"]


@dataclass
class BCOConfig(SampleOptions, OfflineReferenceOptions, OfflineConfig):
    """Options of `BCOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    prompt_sample_size: Annotated[int, Ge(2)] = opt(
        1024, "Number of prompts to fit the density-ratio classifier on, half of them desirable; needs embedding_func."
    )
    min_density_ratio: Annotated[float, Ge(0)] = opt(
        0.5, "Smallest weight of an undesirable row; needs embedding_func."
    )
    max_density_ratio: Annotated[float, Gt(0)] = opt(
        10.0, "Largest weight of an undesirable row; needs embedding_func."
    )

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, DENSITY_RATIOS_RULES)
