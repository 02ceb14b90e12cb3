"""The folder of a run, read without torch: metrics, options, versions, starts, and what they say about its health."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from prefrl.errors import ConfigError, masked, printable
from prefrl.run.checkpoints import step_of
from prefrl.run.folder import (
    IDENTITY,
    METRICS_FILE,
    STARTS,
    Identity,
    Start,
    is_trained,
    read_identity,
    read_metrics,
    read_starts,
)

_TIME = re.compile(r"time/(\w+)_s")
_NOT_METRICS = ("step", "epoch", "stage", "run", "time")

Point = tuple[int, float]  # optimizer step, value


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it."""

    folder: Path
    identity: Identity | None
    rows: list[dict[str, Any]]  # logged metrics, with "step", which never goes down
    config: dict[str, Any]  # options by name, without secrets
    starts: list[Start]
    num_steps: int | None  # optimizer steps that are planned
    summary: dict[str, Any]  # what the program that trained has left in summary.json, as the demo does

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.resolve().name

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the registry; empty if it is not known."""
        return str(self.identity.decisive.get("algorithm", "")) if self.identity else ""

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row["step"] for row in self.rows), default=0)

    def times(self) -> dict[str, float]:
        """The mean seconds that each phase took in an optimizer step, the longest first."""
        phases: dict[str, list[float]] = {}
        for row in self.rows:
            for key, value in row.items():
                found = _TIME.fullmatch(key)
                if found and "step_time" in row and _is_finite(value):
                    phases.setdefault(found[1], []).append(value)
        means = {name: sum(values) / len(values) for name, values in phases.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. A run that is under way can be read, too.

    Raises:
        ConfigError: It is not the folder of a run.
    """
    checkpoint = last_checkpoint(folder)
    identity = read_identity(folder) or (read_identity(checkpoint) if checkpoint else None)
    if identity is None and checkpoint is None and not (folder / METRICS_FILE).is_file():
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run: it has no {IDENTITY}, {METRICS_FILE} or checkpoint-N. Pass "
            "the output_dir of a run."
        )
    state = _json(checkpoint / "trainer_state.json") if checkpoint else {}
    rows = read_metrics(folder) if (folder / METRICS_FILE).is_file() else state.get("log_history", [])
    arguments = _json(folder / "training_args.json") or (
        _json(checkpoint / "training_args.json") if checkpoint else {}
    )
    decisive = identity.decisive if identity else {}
    planned = state.get("max_steps") or arguments.get("max_steps") or -1
    return RunRecord(
        folder,
        identity,
        rows,
        masked({**decisive, **arguments}),
        read_starts(folder, identity.run) if identity else [],
        planned if planned > 0 else None,
        {name: v for name, v in _json(folder / "summary.json").items() if isinstance(v, str | int | float)},
    )


_SILENCE_S = 180.0  # after which a run that may still be under way is said to have no news


def state_of(run: RunRecord, now: float) -> str:
    """What a run is doing, in words: finished, ended early, stopped, live, or without news.

    Args:
        run: The run.
        now: Seconds since the epoch, as files have their times.
    """
    of = f" of {run.num_steps}" if run.num_steps else ""
    has_ended = bool(run.rows) and "train_runtime" in run.rows[-1]  # the last log of a training
    is_complete = run.num_steps is None or run.step >= run.num_steps
    if has_ended:
        return "finished" if is_complete else f"ended at step {run.step}{of}"
    if is_trained(run.folder) is False:
        return f"stopped at step {run.step}{of}"
    files = [run.folder / name for name in (METRICS_FILE, STARTS)]
    silence = now - max((path.stat().st_mtime for path in files if path.is_file()), default=now)
    return "live" if silence < _SILENCE_S else f"no news for {silence // 60:.0f} min"


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The finite values of each metric with their steps; names have no control characters."""
    series: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_METRICS and _is_finite(value):
                series.setdefault(printable(name), []).append((row["step"], value))
    return series


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of as many neighbors each as are needed, and the last point as it is."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    *parts, last = [points[i : i + size] for i in range(0, len(points) - 1, size)] + [points[-1:]]
    means = [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts]
    return [*means[: limit - 1], *last]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run with the highest step; None if there is none."""
    steps = [(step_of(path.name), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    known = [(step, path) for step, path in steps if step is not None]
    return max(known)[1] if known else None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True)
class HealthEvent:
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


def events_of(run: RunRecord) -> list[HealthEvent]:
    """The events of a run by their first step; the same finding in logs that follow each other is one event."""
    events = [event for rule in _RULES for event in _by_rule(run.rows, *rule)]
    events += [event for name, text in _COUNTS for event in _increases(run.rows, name, text)]
    for path in run.folder.glob("nan-step-*"):
        number = path.name.removeprefix("nan-step-")
        if number.isdecimal():
            step = int(number)
            events.append(HealthEvent(step, step, True, f"The state before a failed step is in {path.name}."))
    return sorted(events, key=lambda event: (event.first, event.text))


def _by_rule(
    rows: Sequence[Mapping[str, Any]], name: str, is_bad: Callable[[float], bool], is_severe: bool, text: str
) -> Iterator[HealthEvent]:
    steps: list[int] = []
    for row in rows:
        found = [v for key, v in row.items() if key == name or key.endswith(f"/{name}")]
        values = [math.nan if v is None else v for v in found if v is None or _is_number(v)]  # JSON has no NaN
        if not values:
            continue
        if any(map(is_bad, values)):
            steps.append(row["step"])
        elif steps:
            yield HealthEvent(steps[0], steps[-1], is_severe, text)
            steps = []
    if steps:
        yield HealthEvent(steps[0], steps[-1], is_severe, text)


def _increases(rows: Sequence[Mapping[str, Any]], name: str, text: str) -> Iterator[HealthEvent]:
    before = 0.0
    for row in rows:
        count = row.get(name)
        if _is_number(count):
            if count > before:
                yield HealthEvent(row["step"], row["step"], True, text)
            before = count


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
