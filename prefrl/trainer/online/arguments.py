"""The arguments that the constructors of online trainers take by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from prefrl.trainer.base_trainer import Optimizers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, TrainerCallback

    from prefrl.data.images import ProcessingClass
    from prefrl.trainer.online.episodes import EnvironmentFactory, Tools

__all__ = ["OnlineArguments"]


class OnlineArguments(TypedDict, total=False):
    """See `OnlineTrainer`."""

    train_dataset: Dataset | IterableDataset | None
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None
    processing_class: ProcessingClass | None
    reward_processing_classes: ProcessingClass | list[ProcessingClass | None] | None
    callbacks: list[TrainerCallback] | None
    optimizers: Optimizers
    quantization_config: BitsAndBytesConfig | None
    peft_config: PeftConfig | None
    tools: Tools | None
    environment_factory: EnvironmentFactory | None
