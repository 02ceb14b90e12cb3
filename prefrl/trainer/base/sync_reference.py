"""Moves the reference model toward the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from prefrl import distributed

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.models.reference import Reference

__all__ = ["SyncReference"]


class SyncReference(TrainerCallback):
    """reference = alpha * policy + (1 - alpha) * reference, every `steps` optimizer steps.

    Source: Gorbatovski et al. 2024 (TR-DPO), arXiv 2404.09656, eq. 2.
    """

    def __init__(self, reference: Reference, *, alpha: float, steps: int) -> None:
        self.reference = reference
        self.alpha = alpha
        self.steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mix the policy into the reference after an optimizer step, if it is due."""
        model: nn.Module = kwargs["model"]
        if state.global_step % self.steps == 0:
            self.reference.mix(distributed.unwrap(model), self.alpha)
