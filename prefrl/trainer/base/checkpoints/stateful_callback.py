"""A callback whose state is part of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from transformers import TrainerCallback

__all__ = ["StatefulCallback"]


class StatefulCallback(TrainerCallback, ABC):
    """A callback whose state is written into checkpoints, and read when training resumes."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write the state into a checkpoint. Called on the process that writes."""

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote. Called on all processes, before `on_train_begin`."""
