"""Where the time of an optimizer step goes, and how many floating-point operations its passes run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.metrics import Mean, Metric
from prefrl.models.flops import FlopCounter, ModelCost, floor_flops, recomputed_share

if TYPE_CHECKING:
    from torch import nn

    from prefrl.types import TokenBatch

__all__ = ["EndOfOptimizerPhase", "Pass", "StepAccount", "StepFlops", "idle_share"]

# Passes whose operations are counted.
Pass = Literal["training", "reference", "old_policy"]

# The phases in which they run.
_COUNTED_PHASES = ("forward", "backward", "reference", "old_policy")


class Mark(Protocol):
    """A moment, with the methods of a `torch.cuda.Event`."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this moment to another mark of the same kind."""
        ...

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait until it has come."""
        ...


@dataclass(frozen=True, slots=True)
class _HostMark:
    seconds: float

    def elapsed_time(self, end: _HostMark) -> float:
        return (end.seconds - self.seconds) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _device_mark() -> Mark:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record()
    return event


@dataclass
class _Step:
    """Moments at which a phase begins, in order; None is outside the step."""

    marks: list[tuple[Mark, str | None]] = field(default_factory=list)
    moved: list[tuple[str | None, str, float]] = field(default_factory=list)  # from, to, seconds

    def seconds(self) -> Iterator[tuple[str | None, float]]:
        """Of the phases; one may come several times."""
        for (start, phase), (end, _) in zip(self.marks, self.marks[1:], strict=False):
            yield phase, start.elapsed_time(end) / 1000
        for origin, phase, seconds in self.moved:
            yield origin, -seconds
            yield phase, seconds


class StepAccount:
    """A stopwatch for the phases of an optimizer step; what lies in no phase is "other".

    On a GPU moments are events in its stream, read when metrics are: nothing in a step waits for the device, and a
    phase lasts as long as the device works on it. Where no step is under way, phases are not timed.

    Args:
        device: Where the step runs.
        clock: Seconds on the host.
        flops: Counts operations, too; None: they are not counted.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        flops: StepFlops | None = None,
    ) -> None:
        self.clock = clock
        self.flops = flops
        self.new_mark: Callable[[], Mark] = _device_mark if device.type == "cuda" else self._host_mark
        self._step: _Step | None = None
        self._phases: list[str | None] = []  # those under way, the innermost last
        self._waiting: list[_Step] = []  # ended on the host, perhaps not on the device
        self._totals: dict[str, float] = {}  # seconds of all steps since the last `drain`
        self._num_steps = 0

    def start(self) -> None:
        """A step begins; one that was not finished is forgotten."""
        self._step = _Step()
        self._phases = ["other"]
        self._note()
        if self.flops is not None:
            self.flops.start()

    def finish(self) -> None:
        """The step ends, if one is under way."""
        if self._step is None:
            return
        self._note()
        self._waiting.append(self._step)
        self._step = None
        if self.flops is not None:
            self.flops.finish()
        while self._waiting and self._waiting[0].marks[-1][0].query():
            self._add(self._waiting.pop(0))

    @contextmanager
    def phase(self, name: str | None) -> Iterator[None]:
        """What runs inside is this phase, not the one around it; None: not of the step, whatever runs inside."""
        if not self._is_timing:
            yield
            return
        self._phases.append(name)
        self._note()
        try:
            yield
        finally:
            self._phases.pop()
            self._note()

    def switch(self, name: str) -> None:
        """From here on, what lies in no phase is this one."""
        if self._step is not None:
            self._phases[0] = name
            self._note()

    def move(self, name: str, seconds: float) -> None:
        """Seconds of the phase under way that are another's, by the host's clock."""
        if self._step is not None:
            self._step.moved.append((self._phases[-1], name, seconds))

    @contextmanager
    def scoring(self, kind: Pass, batch: TokenBatch) -> Iterator[None]:
        """A phase that is one counted pass."""
        with self.passes(kind, [batch]), self.phase(kind):
            yield

    @contextmanager
    def passes(self, kind: Pass, batches: Sequence[TokenBatch]) -> Iterator[None]:
        """The passes inside, over these rows, are counted if operations are."""
        if not self._is_timing or self.flops is None:
            yield
            return
        with self.flops.count(kind, batches):
            yield

    def drain(self, names: Iterable[str]) -> dict[str, Metric]:
        """Means over the steps since the last call, of these phases and all that were met.

        Returns:
            `time/<phase>_s` and their sum, `step_time`, in seconds; with operations, `perf/...`, see `StepFlops`.
        """
        for step in self._waiting:
            step.marks[-1][0].synchronize()
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

    @property
    def _is_timing(self) -> bool:
        return self._step is not None and self._phases[-1] is not None

    def _note(self) -> None:
        if self._step is not None:
            self._step.marks.append((self.new_mark(), self._phases[-1]))

    def _host_mark(self) -> Mark:
        return _HostMark(self.clock())

    def _add(self, step: _Step) -> None:
        self._num_steps += 1
        for phase, seconds in step.seconds():
            if phase is not None:
                self._totals[phase] = self._totals.get(phase, 0.0) + seconds


class StepFlops:
    """Operations that a step's passes run, and the fewest that its rows need; see `models.flops`.

    The floor has each pass that the algorithm makes once: the training pass, the reference's and those of the policy
    without gradients. Generation and rewards are left out of both.

    Args:
        model: The policy.
        policy: Its cost.
    """

    def __init__(self, model: nn.Module, policy: ModelCost) -> None:
        self.reference = policy
        self._model = model
        self._policy = policy
        self._rows: dict[Pass, list[TokenBatch]] = {}  # of the step under way
        self._step_flops = 0.0
        self._is_counting = False
        self._counted = 0.0
        self._floor = 0.0

    def start(self) -> None:
        """Forget what was counted in a step that was not finished."""
        self._rows = {}
        self._step_flops = 0.0

    @contextmanager
    def count(self, kind: Pass, batches: Sequence[TokenBatch]) -> Iterator[None]:
        """Count the passes inside; inside another `count` they are counted once."""
        self._rows.setdefault(kind, []).extend(batches)
        if self._is_counting:
            yield
            return
        self._is_counting = True
        try:
            with FlopCounter() as counter:
                yield
        finally:
            self._is_counting = False
        self._step_flops += counter.total

    def finish(self) -> None:
        """The step ends."""
        self._counted += self._step_flops
        for kind, batches in self._rows.items():
            cost = self.reference if kind == "reference" else self._policy
            trains = kind == "training"
            share = recomputed_share(self._model) if trains else 0.0
            self._floor += floor_flops(cost, batches, trains=trains, recomputed_share=share)
        self.start()

    def drain(self, seconds: float, num_steps: int) -> dict[str, Metric]:
        """Since the last call.

        Args:
            seconds: That the counted passes took on this rank.
            num_steps: Optimizer steps.

        Returns:
            `perf/flops` and `perf/flops_floor`, per step, summed over ranks; `perf/step_efficiency`, the floor's share
            of what ran; `perf/tflops_per_s`, 10^12 operations in a second of those passes, of one process.
        """
        steps_of_all = num_steps / distributed.world_size()
        (counted,) = distributed.team_totals([self._counted], next(self._model.parameters()).device)
        floor = self._floor
        self._counted = self._floor = 0.0
        return {
            "perf/flops": Mean(counted, steps_of_all),
            "perf/flops_floor": Mean(floor, steps_of_all),
            "perf/step_efficiency": Mean(floor, counted),
            "perf/tflops_per_s": Mean(counted / 1e12, seconds * distributed.team_size()),
        }


class EndOfOptimizerPhase(TrainerCallback):
    """Clipping and optimizer are done; the rest of the step is "other"."""

    def __init__(self, account: StepAccount) -> None:
        self.account = account

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """HuggingFace's hook, right after the optimizer's step."""
        self.account.switch("other")


def idle_share(num_tokens: float, most_tokens: float, world_size: int) -> dict[str, Metric]:
    """The share of the ranks' time in which they wait for the one with most tokens, if there are several.

    Args:
        num_tokens: That all ranks run forward in a step.
        most_tokens: That one of them runs.
        world_size: Number of ranks.
    """
    room = most_tokens * world_size
    return {"balance/idle_share": Mean(room - num_tokens, room)} if world_size > 1 and room else {}
