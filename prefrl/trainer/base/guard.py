"""Judges each optimizer step before it is applied: whether its numbers are finite, and how unusual they are."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prefrl.metrics import Max, Metric

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StepGuard", "has_problem"]

# Steps whose losses a new one is compared with, and the fewest that say what is usual.
_WINDOW = 100
_FEWEST = 10
# The standard deviation of a normal distribution is this many times its median absolute deviation.
_MAD_SCALE = 1.4826
_FILE = "guard.json"
_COUNTS = ("num_skipped", "num_rollbacks", "in_a_row")


def has_problem(numbers: Tensor) -> Tensor:
    """[] bool on the device: whether `StepGuard.problem` will find one, if gradients may not overflow.

    Args:
        numbers: [num_processes, >= 2], for each process, its share of the loss, the gradient norm, and more.
    """
    norms = numbers[:, 1]
    return ~(numbers[:, :2].isfinite().all() & (norms >= 0).all())


@dataclass
class StepGuard:
    """Looks at the loss, the gradient norm and the KL of each step.

    Args:
        patience: Steps in a row that are left out because they are not finite, after which training must stop.
        watched: What is compared with the steps before: loss, grad_norm, kl.
    """

    patience: int
    watched: Collection[str] = ("loss",)
    num_skipped: int = 0
    num_rollbacks: int = 0
    in_a_row: int = 0  # of the skipped steps, the latest ones without a finite one between them
    known: dict[str, deque[float]] = field(default_factory=dict)  # of the latest finite steps, what is watched

    @property
    def is_exhausted(self) -> bool:
        """Whether training must stop."""
        return self.in_a_row >= self.patience

    def problem(self, numbers: Sequence[Sequence[float]], *, may_overflow: Callable[[], bool]) -> str | None:
        """Judge a step; what is not finite, and on which process. None: the step may be applied.

        Args:
            numbers: For each process, its share of the loss, the gradient norm over all processes, and more.
            may_overflow: Whether a gradient norm that is not finite is no problem, because the scaler of float16
                leaves the step out and tries a smaller scale.
        """
        found = None
        for process, (loss, norm, *_) in enumerate(numbers):
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
        """How unusual a step is, and remember it.

        Args:
            numbers: For each process, its share of the loss, the gradient norm over all processes, and the sum and the
                count of its KL. A count of 0 on all of them: there is none.

        Returns:
            `guard/<name>_spike` of what is watched: (value - median) / (1.4826 * median absolute deviation) over the
            last 100 steps; the largest since the last log. Left out while there are fewer than 10, or if they do not
            differ.
        """
        values = {"loss": statistics.fmean(row[0] for row in numbers), "grad_norm": numbers[0][1]}
        if num_tokens := sum(sum(row[3:]) for row in numbers):
            values["kl"] = sum(row[2] for row in numbers) / num_tokens
        return {
            f"guard/{name}_spike": Max(score)
            for name in self.watched
            if name in values and (score := self._score(name, values[name])) is not None
        }

    def _score(self, name: str, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        window = self.known.setdefault(name, deque(maxlen=_WINDOW))
        known = list(window)
        window.append(value)
        if len(known) < _FEWEST:
            return None
        median = statistics.median(known)
        deviation = _MAD_SCALE * statistics.median(abs(other - median) for other in known)
        return (value - median) / deviation if deviation > 0 else None

    # Checkpoints. The state is the same on all processes.

    def save(self, folder: Path) -> None:
        """Write the state; called on one process."""
        state = {name: getattr(self, name) for name in _COUNTS}
        state["known"] = {name: list(values) for name, values in self.known.items()}
        (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        state = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.known = {name: deque(values, maxlen=_WINDOW) for name, values in state["known"].items()}
