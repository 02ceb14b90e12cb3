"""Starts each training with nothing left over from the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.generation.base import Generator
    from prefrl.rollout.ahead import GenerationsAhead

__all__ = ["NewTraining"]


class NewTraining(TrainerCallback):
    """Optimizer steps are counted anew, so their numbers do not tell weights of two trainings apart."""

    def __init__(self, generator: Generator, ahead: GenerationsAhead) -> None:
        self.generator = generator
        self.ahead = ahead

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The generator gets the weights before the first step."""
        self.ahead.drop()
        self.generator.invalidate()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A training that stops early needs no more completions."""
        self.ahead.drop()
