"""The way back to the last checkpoint after a spike, with a smaller learning rate."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Rollback", "RollbackRequest", "scale_learning_rates"]

_FILE = "rollback.json"


class RollbackRequest(Exception):
    """Raised in a step that is not applied: training goes on from a checkpoint."""


@dataclass(frozen=True)
class Rollback:
    """Where training has gone back to. It is noted in the run's folder, so that a resumed run knows it.

    Checkpoints that are written later hold the smaller learning rate themselves.
    """

    folder: Path | None = None
    times: int = 0  # to this checkpoint

    def num_to(self, folder: Path | None) -> int:
        """Rollbacks to a checkpoint so far."""
        return self.times if folder is not None and folder == self.folder else 0

    def again(self, folder: Path) -> Rollback:
        """One more rollback, to a checkpoint."""
        return Rollback(folder, self.num_to(folder) + 1)

    def note(self, run_folder: Path, *, run: str) -> None:
        """Write it to the run's folder; called on one process."""
        assert self.folder is not None
        aside = run_folder / f"{_FILE}.part"
        aside.write_text(json.dumps({"run": run, "checkpoint": self.folder.name, "times": self.times}))
        os.replace(aside, run_folder / _FILE)

    @classmethod
    def noted(cls, run_folder: Path, *, run: str, checkpoint: Path | None) -> Rollback:
        """The rollback to the checkpoint that a run resumes from, if there was one."""
        path = run_folder / _FILE
        if checkpoint is None or not path.exists():
            return cls()
        state = json.loads(path.read_text(encoding="utf-8"))
        folder = run_folder / state["checkpoint"]
        is_this = state["run"] == run and folder.resolve() == checkpoint.resolve()
        return cls(folder, state["times"]) if is_this else cls()


def scale_learning_rates(factor: float, optimizer: Any, scheduler: Any) -> None:
    """Multiply the learning rates from here on, now and at the start of the schedule, by a factor."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
    _scale_schedule(factor, scheduler)


def _scale_schedule(factor: float, scheduler: Any) -> None:
    for name in ("base_lrs", "_last_lr"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    for part in getattr(scheduler, "_schedulers", []):  # of torch's ChainedScheduler and SequentialLR
        _scale_schedule(factor, part)
