"""An optimizer step: what it is made of, the plan that counts steps, how its time is spent, and what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch.profiler import record_function

from prefrl import distributed
from prefrl.metrics import Mean, Metric, host, merge
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prefrl.models.flops import ModelCost
    from prefrl.trainer.base_config import BaseConfig


class MicroStep(Protocol):
    """Forward and backward pass of one micro-batch."""

    def __call__(
        self, model: nn.Module, batch: TokenBatch, num_items: Tensor | float | None, *, is_last: bool
    ) -> Tensor:
        """The micro-batch's share of the loss. The last micro-batch of a step synchronizes gradients over ranks."""
        ...


class Step(Protocol):
    """The item that HuggingFace's loop passes to `training_step`."""

    micro_batches: list[TokenBatch]  # those that are known so far, or have run
    num_items: float  # what their sums are divided by, known when they have run

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run all micro-batches and return the loss of the step on this rank."""
        ...


@dataclass
class SyncStep:
    """A `Step` whose micro-batches are all known when it begins; with none, it is an empty item."""

    micro_batches: list[TokenBatch] = field(default_factory=list)
    num_items: float = 1.0

    def run(self, model: nn.Module, micro_step: MicroStep, num_items: Tensor | float | None) -> Tensor:
        """Run the micro-batches one after another."""
        self.num_items = max(float(num_items or 0.0), 1.0)
        total = torch.zeros(())
        for i, batch in enumerate(self.micro_batches):
            total = total + micro_step(model, batch, num_items, is_last=i + 1 == len(self.micro_batches))
        return total


@dataclass(frozen=True)
class LongBatch:
    """A micro-batch of rows that are as long as any.

    Args:
        batch: Ready for its loss.
        tokens: What `max_tokens_per_micro_batch` counts for these rows.
    """

    batch: TokenBatch
    tokens: int


def limits_of(args: BaseConfig) -> list[BaseConfig]:
    """The options with each limit of a training, of which HuggingFace's loop knows one: steps, or else epochs."""
    if not args.stop_at_first_limit or args.max_steps <= 0:
        return [args]
    by_epochs = copy(args)
    by_epochs.max_steps = -1
    return [by_epochs, args]


class StepPlan:
    """Counts the steps of a run as they are planned when it begins, and finds the generation batches of each.

    An optimizer step is one planned step; only when the batch grows does it take the data of several, see
    `features.growth`.

    Args:
        unit: Planned steps that belong together: those that learn from one generation batch; offline, 1.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.total = self.per_epoch = 1
        self.last_unit = 0  # the number of the last generation batch of the run
        self.position = 0  # planned steps that are done
        self.start = self.end = 0  # of the unit that is under way

    def start_at(self, step: int, *, total: int, per_epoch: int, checkpoint: Path | None) -> None:
        """Start at a step of a run: 0, or the one that a checkpoint was written after.

        Args:
            step: Optimizer steps that are done.
            total: Planned steps of the run.
            per_epoch: Planned steps of an epoch.
            checkpoint: Where training resumes from.
        """
        self.total, self.per_epoch, self.position = total, per_epoch, step
        self.last_unit = (total - 1) // self.unit
        self.end = -(-step // self.unit) * self.unit
        self.start = self.end - self.unit

    def next_items(self, items: Iterator[Any], num_each: int) -> list[Any]:
        """The data loader's items for the next step; [] at the end of an epoch.

        Args:
            items: Of the rest of the epoch.
            num_each: Items of a planned step.
        """
        found = list(islice(items, num_each))
        if found and self.position >= self.end:
            self.start, self.end = self.position, self.position + self.unit
        return found

    def end_step(self) -> None:
        """Count the step that is under way."""
        self.position += 1

    @property
    def units(self) -> range:
        """The numbers of the generation batches that the unit under way learns from."""
        return range(self.start // self.unit, self.end // self.unit)

    @property
    def units_left(self) -> range:
        """The numbers of the generation batches that later units need."""
        return range(self.end // self.unit, self.last_unit + 1)

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end."""
        return self.total - self.position


# How its time is spent.

# Passes whose operations are counted.
Pass = Literal["training", "reference", "teacher", "old_policy"]

# The phases in which they run.
_COUNTED_PHASES = ("forward", "backward", "reference", "teacher", "old_policy")


class CountsFlops(Protocol):
    """Counts the floating-point operations of a step's passes."""

    others: dict[Pass, ModelCost]  # the costs of reference and teacher

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
    """The share of the ranks' time that they wait for the rank with the most tokens.

    Args:
        num_tokens: Forward tokens of all ranks in a step.
        most_tokens: Forward tokens of the rank that has the most.
        world_size: Number of ranks.
    """
    room = most_tokens * world_size
    return {"balance/idle_share": Mean(room - num_tokens, room)} if room else {}


def drained(
    metrics: dict[Literal["train", "eval"], dict[str, Metric]], mode: Literal["train", "eval"]
) -> dict[str, float]:
    """Values of the metrics so far, merged over ranks, on the host; resets the metrics."""
    hosted = {name: host(metric) for name, metric in metrics[mode].items()}
    metrics[mode] = {}
    merged: dict[str, Metric] = {}
    for part in distributed.gather_objects(hosted):
        merge(merged, part)
    return {name: metric.value() for name, metric in merged.items()}
