"""Judges each optimizer step before it is applied: whether its numbers are finite, and how unusual its loss is."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefrl.metrics import Max, Metric

__all__ = ["StepGuard"]

# Steps whose losses a new one is compared with, and the fewest that say what is usual.
_WINDOW = 100
_FEWEST = 10
# The standard deviation of a normal distribution is this many times its median absolute deviation.
_MAD_SCALE = 1.4826
_FILE = "guard.json"


@dataclass
class StepGuard:
    """Looks at the loss and the gradient norm of each step.

    Args:
        patience: Steps in a row that are left out because they are not finite, after which training must stop.
    """

    patience: int
    num_skipped: int = 0
    in_a_row: int = 0  # of the skipped steps, the latest ones without a finite one between them
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # of the latest finite steps

    @property
    def is_exhausted(self) -> bool:
        """Whether training must stop."""
        return self.in_a_row >= self.patience

    def problem(self, numbers: Sequence[Sequence[float]], *, may_overflow: Callable[[], bool]) -> str | None:
        """Judge a step; what is not finite, and on which process. None: the step may be applied.

        Args:
            numbers: For each process, its share of the loss, and the gradient norm over all processes.
            may_overflow: Whether a gradient norm that is not finite is no problem, because the scaler of float16
                leaves the step out and tries a smaller scale.
        """
        found = None
        for process, (loss, norm) in enumerate(numbers):
            if not math.isfinite(loss):
                found = f"the loss is {loss}"
            elif not (math.isfinite(norm) and norm >= 0) and not may_overflow():  # DeepSpeed may report NaN as -1
                found = f"the gradient norm is {norm}"
            if found is not None:
                found = found if len(numbers) == 1 else f"{found} on process {process}"
                break
        if found is None:
            self.in_a_row = 0
        else:
            self.num_skipped += 1
            self.in_a_row += 1
        return found

    def spike(self, numbers: Sequence[Sequence[float]]) -> dict[str, Metric]:
        """How unusual the loss of a step is, and remember it.

        Returns:
            `guard/loss_spike`: (loss - median) / (1.4826 * median absolute deviation) over the last 100 steps; the
            largest since the last log. Left out while there are fewer than 10, or if they do not differ.
        """
        loss = statistics.fmean(loss for loss, _ in numbers)
        known = list(self.losses)
        if not math.isfinite(loss):
            return {}
        self.losses.append(loss)
        if len(known) < _FEWEST:
            return {}
        median = statistics.median(known)
        deviation = _MAD_SCALE * statistics.median(abs(value - median) for value in known)
        return {"guard/loss_spike": Max((loss - median) / deviation)} if deviation > 0 else {}

    # Checkpoints. The state is the same on all processes.

    def save(self, folder: Path) -> None:
        """Write the state; called on one process."""
        state = {"num_skipped": self.num_skipped, "in_a_row": self.in_a_row, "losses": list(self.losses)}
        (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        self.num_skipped, self.in_a_row = state["num_skipped"], state["in_a_row"]
        self.losses.clear()
        self.losses.extend(state["losses"])
