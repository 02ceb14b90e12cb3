"""Calls hooks at the start and end of each training run, so that nothing is left over from the previous one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["NewTraining"]


class NewTraining(TrainerCallback):
    """Calls one function before the first step of a training run, and another after the last."""

    def __init__(self, *, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.begin = begin
        self.end = end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self.begin()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self.end()
