"""What a run's metrics say about its health."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from prefrl.scripts.report.run import RunRecord

__all__ = ["Event", "events_of"]


@dataclass(frozen=True)
class Event:
    """Something that went wrong, or may have."""

    first: int  # optimizer step
    last: int
    is_severe: bool
    text: str


# Metric, test of its value, whether that is severe, and what it means. Values of `rewards/<name>/none` are tested by
# the last part of the name.
_RULES: tuple[tuple[str, Callable[[float], bool], bool, str], ...] = (
    ("loss", lambda v: not math.isfinite(v), True, "The loss was not finite."),
    ("grad_norm", lambda v: not math.isfinite(v), True, "The gradient was not finite."),
    ("health/signal_fraction", lambda v: v == 0, True, "No completion had a learning signal."),
    ("frac_reward_zero_std", lambda v: v >= 0.9, False, "At least 90 % of the groups had equal rewards."),
    ("completions/clipped_ratio", lambda v: v >= 0.5, False, "At least half of the completions were cut off."),
    ("frac_unscored", lambda v: v > 0, False, "Some completions were not scored by any reward."),
    ("none", lambda v: v > 0, False, "A reward returned None."),
    ("server/retries", lambda v: v > 0, False, "Requests to the server were repeated."),
    ("server/restarts", lambda v: v > 0, False, "The server was restarted."),
)
# Counts since the run began: each increase is an event.
_COUNTS = (
    ("guard/skipped_steps", "Steps were skipped, because loss or gradient was not finite."),
    ("guard/rollbacks", "The run went back to an earlier checkpoint."),
)


def events_of(run: RunRecord) -> list[Event]:
    """The events of a run by their first step; the same finding in logs that follow each other is one event."""
    events = [event for rule in _RULES for event in _by_rule(run.rows, *rule)]
    events += [event for name, text in _COUNTS for event in _increases(run.rows, name, text)]
    for path in run.folder.glob("nan-step-*"):
        number = path.name.removeprefix("nan-step-")
        if number.isdecimal():
            step = int(number)
            events.append(Event(step, step, True, f"The state before a failed step is in {path.name}."))
    return sorted(events, key=lambda event: (event.first, event.text))


def _by_rule(
    rows: Sequence[Mapping[str, Any]], name: str, is_bad: Callable[[float], bool], is_severe: bool, text: str
) -> Iterator[Event]:
    steps: list[int] = []
    for row in rows:
        found = [v for key, v in row.items() if key == name or key.endswith(f"/{name}")]
        values = [math.nan if v is None else v for v in found if v is None or _is_number(v)]  # JSON has no NaN
        if not values:
            continue
        if any(map(is_bad, values)):
            steps.append(row["step"])
        elif steps:
            yield Event(steps[0], steps[-1], is_severe, text)
            steps = []
    if steps:
        yield Event(steps[0], steps[-1], is_severe, text)


def _increases(rows: Sequence[Mapping[str, Any]], name: str, text: str) -> Iterator[Event]:
    before = 0.0
    for row in rows:
        count = row.get(name)
        if _is_number(count):
            if count > before:
                yield Event(row["step"], row["step"], True, text)
            before = count


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
