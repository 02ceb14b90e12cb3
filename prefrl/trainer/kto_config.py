"""Options of KTO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from prefrl.options.fields import opt
from prefrl.options.offline_rules import LABELS_RULES
from prefrl.options.rules import apply
from prefrl.trainer.base.options.reference import PRECOMPUTED_REFERENCE_RULES, REFERENCE_RULES, OfflineReferenceOptions
from prefrl.trainer.offline.config import OfflineConfig

__all__ = ["KTOConfig"]


@dataclass
class KTOConfig(OfflineReferenceOptions, OfflineConfig):
    """Options of `KTOTrainer`."""

    learning_rate: float = opt(1e-6, "Initial learning rate.")
    disable_dropout: bool = opt(True, "Set all dropout rates of the model to 0, including those of adapters.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = opt(
        "kto", "Reference point of the rewards: a KL estimate (kto), or 0 (apo_zero_unpaired)."
    )
    desirable_weight: Annotated[float, Ge(0)] = opt(1.0, "Weight of the loss of desirable rows.")
    undesirable_weight: Annotated[float, Ge(0)] = opt(1.0, "Weight of the loss of undesirable rows.")

    def validate(self) -> None:
        """See `BaseConfig.validate`."""
        super().validate()
        apply(self, REFERENCE_RULES, PRECOMPUTED_REFERENCE_RULES, LABELS_RULES)
