"""What `compute_metrics` gets and `predict` returns: the predictions of all rows, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import EvalPrediction

from prefrl import distributed
from prefrl.errors import ConfigError

__all__ = ["NO_TOKEN", "ComputeMetrics", "PredictedRows", "metrics_of"]

ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]

NO_TOKEN = -100  # in the place of a token that is not predicted or not learned


@dataclass
class PredictedRows:
    """The predictions and labels of the rows that this process has evaluated, and the dataset rows, where needed."""

    predictions: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)

    def add(self, predictions: Sequence[Any], labels: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        """Add some rows."""
        self.predictions += predictions
        self.labels += labels
        self.inputs += inputs

    def gathered(self) -> EvalPrediction:
        """The rows of all processes, which all must call it. Lists of ids are filled up with -100 to the longest."""
        parts = distributed.gather_objects((self.predictions, self.labels, self.inputs))
        predictions, labels, inputs = ([row for part in parts for row in part[i]] for i in range(3))
        return EvalPrediction(_array(predictions), _array(labels), inputs or None)


def metrics_of(compute_metrics: ComputeMetrics, rows: EvalPrediction) -> dict[str, float]:
    """What the user's function makes of the rows of all processes.

    Raises:
        ConfigError: The function does not return a mapping of names to numbers.
    """
    found = compute_metrics(rows)
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics returned {found!r:.80}: must be a mapping of names to numbers")
    wrong = [name for name, value in found.items() if np.ndim(value) != 0 or not np.isreal(value)]
    if wrong:
        raise ConfigError(f"compute_metrics: {wrong[0]!r} is {found[wrong[0]]!r:.80}: must be a number")
    return {name: float(value) for name, value in found.items()}


def _array(rows: Sequence[Any]) -> Any:
    """An array of numbers, or of lists of ids; other rows are given as they are."""
    if not rows or not isinstance(rows[0], np.ndarray) or rows[0].ndim == 0:
        return rows if rows and isinstance(rows[0], str | list) else np.array(rows)
    if len({len(row) for row in rows}) == 1:
        return np.stack(rows)
    filled = np.full((len(rows), max(map(len, rows))), NO_TOKEN, dtype=rows[0].dtype)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return filled
