"""Measures how the time of an optimizer step is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch.profiler import record_function

from prefrl.metrics import Mean, Metric

if TYPE_CHECKING:
    from prefrl.models.flops import ModelCost
    from prefrl.types import TokenBatch

# Passes whose operations are counted.
Pass = Literal["training", "reference", "old_policy"]

# The phases in which they run.
_COUNTED_PHASES = ("forward", "backward", "reference", "old_policy")


class CountsFlops(Protocol):
    """Counts the floating-point operations of a step's passes."""

    reference: ModelCost  # of the reference

    def start(self) -> None:
        """Discard the counts of an unfinished step."""

    def count(self, kind: Pass, batches: Sequence[TokenBatch]) -> AbstractContextManager[None]:
        """Count the operations of the passes inside."""

    def finish(self) -> None:
        """End the step: add its counts to the totals."""

    def drain(self, seconds: float, num_steps: int) -> dict[str, Metric]:
        """Metrics of the steps since the last call."""


class Event(Protocol):
    """A point in the work of a device: a `torch.cuda.Event`."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


Mark = float | Event  # seconds on the host, or an event of the device


def _device_mark(device: torch.device) -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))  # the current device may be another, which a reward has set
    return event


@dataclass
class _Step:
    """The marks at which phases begin, in order. The phase None does not count as part of the step."""

    marks: list[tuple[Mark, str | None]] = field(default_factory=list)
    moved: list[tuple[str | None, str, float]] = field(default_factory=list)  # from, to, seconds


class StepAccount:
    """A stopwatch for the phases of an optimizer step; time outside of all phases counts as "other".

    On a GPU the marks are CUDA events, which are read when metrics are logged: no step waits for the device, and a
    phase lasts as long as the device works on it. Outside of a step, phases are not timed.

    Args:
        device: The device on which the step runs.
        clock: Returns seconds on the host.
        flops: Counts operations; None: they are not counted.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        flops: CountsFlops | None = None,
    ) -> None:
        self.clock = clock
        self.flops = flops
        self.new_mark: Callable[[], Mark] = (
            partial(_device_mark, device) if device.type == "cuda" else lambda: self.clock()
        )
        self._step: _Step | None = None
        self._phases: list[str | None] = []  # the current phases, innermost last
        self._waiting: list[_Step] = []  # steps that ended on the host, but perhaps not yet on the device
        self._totals: dict[str, float] = {}  # seconds of all steps since the last `drain`
        self._num_steps = 0

    def start(self) -> None:
        """Start a step; an unfinished one is discarded."""
        self._step = _Step()
        self._phases = ["other"]
        self._note()
        if self.flops is not None:
            self.flops.start()

    def finish(self) -> None:
        """End the current step, if there is one."""
        if self._step is None:
            return
        self._note()
        self._waiting.append(self._step)
        self._step = None
        if self.flops is not None:
            self.flops.finish()
        while self._waiting and (isinstance(end := self._waiting[0].marks[-1][0], float) or end.query()):
            self._add(self._waiting.pop(0))

    @property
    def current(self) -> str | None:
        """The phase that the step is in; None outside of steps and of named phases."""
        phases = self._phases if self._step is not None else []
        return phases[-1] if phases and phases[-1] != "other" else None

    @contextmanager
    def phase(
        self, name: str | None, passes: Pass | None = None, batches: Sequence[TokenBatch] = ()
    ) -> Iterator[None]:
        """Count the time inside as this phase, not as the enclosing one; None: nothing inside belongs to the step.

        Profilers show it as a range.

        Args:
            name: Of the phase.
            passes: What the passes inside are, whose operations are counted if any are; None: it has none of its own.
            batches: What they run over.
        """
        if self._step is None or self._phases[-1] is None:
            yield
            return
        counted = nullcontext() if self.flops is None or passes is None else self.flops.count(passes, batches)
        self._phases.append(name)
        self._note()
        try:
            with counted, record_function(f"prefrl: {name or 'not timed'}"):
                yield
        finally:
            self._phases.pop()
            self._note()

    def switch(self, name: str) -> None:
        """From here on, count time outside of all phases as this phase."""
        if self._step is not None:
            self._phases[0] = name
            self._note()

    def move(self, name: str, seconds: float) -> None:
        """Attribute seconds of the current phase, by the host's clock, to another phase."""
        if self._step is not None:
            self._step.moved.append((self._phases[-1], name, seconds))

    def drain(self, names: Iterable[str]) -> dict[str, Metric]:
        """Mean seconds per step since the last call, for these phases and all others that occurred.

        Returns:
            `time/<phase>_s` and their sum, `step_time`, in seconds; if operations are counted, also `perf/...`, see
            `features.flops`.
        """
        for step in self._waiting:
            end = step.marks[-1][0]
            if not isinstance(end, float):
                end.synchronize()
            self._add(step)
        self._waiting = []
        totals = dict.fromkeys((*names, "other"), 0.0) | self._totals
        metrics: dict[str, Metric] = {
            f"time/{name}_s": Mean(seconds, self._num_steps) for name, seconds in totals.items()
        }
        metrics["step_time"] = Mean(sum(totals.values()), self._num_steps)
        if self.flops is not None:
            seconds = sum(totals.get(name, 0.0) for name in _COUNTED_PHASES)
            metrics |= self.flops.drain(seconds, self._num_steps)
        self._totals = dict.fromkeys(self._totals, 0.0)
        self._num_steps = 0
        return metrics

    def _note(self) -> None:
        if self._step is not None:
            self._step.marks.append((self.new_mark(), self._phases[-1]))

    def _add(self, step: _Step) -> None:
        """Add the seconds of a step's phases, each of which may occur several times, to the totals."""
        self._num_steps += 1
        spent: list[tuple[str | None, float]] = []
        for (start, phase), (end, _) in zip(step.marks, step.marks[1:], strict=False):
            if isinstance(start, float):
                spent.append((phase, cast("float", end) - start))
            else:
                spent.append((phase, start.elapsed_time(end) / 1000))
        for origin, phase, seconds in step.moved:
            spent += [(origin, -seconds), (phase, seconds)]
        for name, seconds in spent:
            if name is not None:
                self._totals[name] = self._totals.get(name, 0.0) + seconds


def idle_share(num_tokens: float, most_tokens: float, world_size: int) -> dict[str, Metric]:
    """The share of the ranks' time that they wait for the rank with the most tokens, if there are several ranks.

    Args:
        num_tokens: Forward tokens of all ranks in a step.
        most_tokens: Forward tokens of the rank that has the most.
        world_size: Number of ranks.
    """
    room = most_tokens * world_size
    return {"balance/idle_share": Mean(room - num_tokens, room)} if world_size > 1 and room else {}
