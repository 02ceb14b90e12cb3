"""Batches that grow when a metric has stopped improving.

A step of a batch that has grown k times takes the rows of k planned steps, and moves the schedule of the learning rate
on by k.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.options.schedule import GrowthParams
from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run
from prefrl.trainer.steps import StepPlan

_log = logging.getLogger(__name__)

_FILE = "step_plan.json"
_STATE = ("num_left", "factor", "position", "start", "end", "span")


@dataclass
class GrowthPlateau:
    """Says when a metric has stopped improving.

    Args:
        params: The metric and the patience.
        best: The best value so far.
        num_since: Values since the best one, or since the last plateau.
    """

    params: GrowthParams
    best: float | None = None
    num_since: int = 0

    def is_reached(self, logs: Mapping[str, Any]) -> bool:
        """Whether these logs make it a plateau; they may be of something else.

        Raises:
            ConfigError: They are of the right kind, but lack the metric.
        """
        value = logs.get(self.params.key)
        if value is None:
            self._check_kind(logs)
            return False
        is_better = self.best is None or (value < self.best if self.params.key.endswith("loss") else value > self.best)
        self.best, self.num_since = (float(value), 0) if is_better else (self.best, self.num_since + 1)
        reached = self.num_since >= self.params.patience
        if reached:
            self.num_since = 0
        return reached

    def _check_kind(self, logs: Mapping[str, Any]) -> None:
        is_training = self.params.eval_split == "training"
        kind = "loss" if is_training else "eval_runtime"
        if kind in logs:
            names = (name if is_training else name.removeprefix("eval_") for name in logs)
            raise ConfigError(
                f"increase_batch_size_kwargs: eval_metric={self.params.eval_metric!r} with "
                f"eval_split={self.params.eval_split!r}: it is not among the metrics: {', '.join(sorted(names))}"
            )


def growing_plan(args: BaseConfig) -> GrowingPlan | None:
    """The plan of a run whose batch may grow, if the options say so."""
    return GrowingPlan(args) if args.increase_batch_size_on_plateau else None


class GrowingPlan(StepPlan, Part):
    """A plan of which an optimizer step takes several steps, once its batch has grown.

    The size of a step changes only between the units of the plan.

    Args:
        args: Options.
    """

    def __init__(self, args: BaseConfig) -> None:
        super().__init__(args.steps_of_a_generation)
        self._args = args
        self._reset()

    def _reset(self) -> None:
        self.num_left = self._args.increase_batch_size_on_plateau  # times that the batch may still grow
        self.plateau = GrowthPlateau(self._args.growth_params)
        self.factor = 1  # planned steps that a step of the next unit takes
        self.span = 1  # planned steps that each step of the unit under way takes

    def start_at(self, step: int, *, total: int, per_epoch: int, checkpoint: Path | None) -> None:
        """See `StepPlan`; a checkpoint without growth, which a resumed run may add, has no state."""
        super().start_at(step, total=total, per_epoch=per_epoch, checkpoint=checkpoint)
        self._reset()
        if checkpoint is not None and (path := checkpoint / _FILE).exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.plateau.best, self.plateau.num_since = state["best"], state["num_since"]
            for name in _STATE:
                setattr(self, name, state[name])

    def save(self, run: Run, folder: Path) -> None:
        """See `Part`; `start_at` reads it."""
        if run.args.should_save:
            state = {name: getattr(self, name) for name in _STATE}
            state |= {"best": self.plateau.best, "num_since": self.plateau.num_since}
            (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def next_items(self, items: Iterator[Any], num_each: int) -> list[Any]:
        """See `StepPlan`."""
        first = list(islice(items, 1))
        if not first:
            return []
        if self.position >= self.end:
            self.start, self.span = self.position, self._units_at(self.position)
            self.end = self.start + self.span * self.unit
        return first + list(islice(items, num_each * self._taken - 1))

    def _units_at(self, position: int) -> int:
        """Units that one unit at this position takes: a step never goes beyond its epoch, nor beyond the end."""
        left = min(self.per_epoch - position % self.per_epoch, self.total - position)
        return min(self.factor, -(-left // self.unit))

    @property
    def _taken(self) -> int:
        """Planned steps of the step that is under way."""
        return min(self.span, self.total - self.position)

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end, if the batch does not grow any more."""
        if self.factor == 1:
            return super().steps_left
        inside = min(self.end, self.total) - self.position
        num_steps = -(-inside // self.span) if inside > 0 else 0
        position = max(self.end, self.position)
        while position < self.total:
            units = self._units_at(position)
            num_steps += -(-min(units * self.unit, self.total - position) // units)
            position += units * self.unit
        return num_steps

    def end_step(self) -> None:
        """See `StepPlan`; `after_step` counts, which knows what was planned."""

    def after_step(self, run: Run) -> None:
        """Counts the step, and moves the schedule on: HuggingFace has moved it by one."""
        taken = self._taken
        self.position += taken
        run.state.epoch = self.position / self.per_epoch
        if not run.optimizer.step_was_skipped:
            for _ in range(taken - 1):
                run.lr_scheduler.step()

    def logged(self, run: Run, logs: dict[str, float]) -> None:
        """Lets the batch grow if the metric has reached a plateau."""
        plateau, state = self.plateau, run.state
        if "loss" in logs:
            logs["batch_growth"] = state.log_history[-1]["batch_growth"] = self.factor
        if not self.num_left or not plateau.is_reached(logs):
            return
        old, self.factor = self.factor, math.ceil(self.factor * plateau.params.rate)
        self.num_left -= 1
        state.max_steps = state.global_step + self.steps_left
        if distributed.is_main():
            _log.warning(
                "step %d: %s has not improved on %g for %d values: a step now learns from %d times the rows that it "
                "began with, not %d. %d more times at most. Training ends after step %d.",
                *(state.global_step, plateau.params.key, plateau.best, plateau.params.patience),
                *(self.factor, old, self.num_left, state.max_steps),
            )
