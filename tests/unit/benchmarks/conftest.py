"""Workloads small enough for a test, and measurements made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.worker import Measurement, Outcome, Turn
from benchmarks.workloads import ModelSizes, Task, Workload

TINY = ModelSizes(hidden_size=32, num_layers=2, ffn_size=64, vocab_size=512, num_heads=4)


def tiny(task: Task, lengths: tuple[int, ...] = (2, 7, 4, 5), **changes: Any) -> Workload:
    defaults: dict[str, Any] = {"prompt_length": 6, "turns": 2}
    return Workload(task, task, task, TINY, lengths, **(defaults | changes))


def measured(
    seconds: Sequence[float],
    *,
    num_tokens: int,
    peak_mib: float = 100.0,
    loss: float | None = 0.5,
    grad_norm: float | None = 2.0,
) -> Measurement:
    """The first of `seconds` is the warm-up; wall seconds are ten times as many."""
    turns = tuple(Turn(s, 10 * s, num_tokens, peak_mib) for s in seconds)
    return Measurement(turns, Outcome(loss, grad_norm, (num_tokens,) * len(seconds)))
