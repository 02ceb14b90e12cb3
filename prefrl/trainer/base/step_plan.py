"""How many steps' worth of data an optimizer step takes: batches that grow when a metric has stopped improving.

Positions are counted in planned steps: those that a run would make if its batch never grew. A step of a batch that has
grown k times takes the rows of k planned steps, and moves the schedule of the learning rate on by k.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.trainer.base.checkpoints.stateful_callback import StatefulCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.options.autopilot import GrowthParams
    from prefrl.trainer.base.config import BaseConfig

__all__ = ["Plateau", "StepPlan"]

_log = logging.getLogger(__name__)

_FILE = "step_plan.json"
_STATE = ("num_left", "factor", "position", "start", "end", "span")


@dataclass
class Plateau:
    """Says when a metric has stopped improving.

    Args:
        params: The metric and the patience.
        best: The best value so far.
        num_since: Values since the best one, or since the last plateau.
    """

    params: GrowthParams
    best: float | None = None
    num_since: int = 0

    @property
    def key(self) -> str:
        """The metric's name in the logs."""
        return self.params.eval_metric if self.params.eval_split == "training" else f"eval_{self.params.eval_metric}"

    def is_reached(self, logs: Mapping[str, Any]) -> bool:
        """Whether these logs make it a plateau; they may be of something else.

        Raises:
            ConfigError: They are of the right kind, but lack the metric.
        """
        value = logs.get(self.key)
        if value is None:
            self._check_kind(logs)
            return False
        is_better = self.best is None or (value < self.best if self.key.endswith("loss") else value > self.best)
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


class StepPlan(StatefulCallback):
    """Counts planned steps, and how many of them each optimizer step takes.

    Args:
        args: Options.
        unit: Planned steps that belong together: those that learn from one generation batch. The size of a step
            changes only between units.
    """

    def __init__(self, args: BaseConfig, *, unit: int) -> None:
        self._args = args
        self.unit = unit
        self.total = self.per_epoch = 1
        self._reset()

    def _reset(self) -> None:
        self.num_left = self._args.increase_batch_size_on_plateau  # times that the batch may still grow
        self.plateau = Plateau(self._args.growth_params) if self.num_left else None
        self.factor = 1  # planned steps that a step of the next unit takes
        self.position = 0  # planned steps that are done
        self.start = self.end = 0  # of the unit that is under way
        self.span = 1  # planned steps that each step of it takes

    def begin(self, folder: Path | None, *, step: int, total: int, per_epoch: int) -> None:
        """Start at step 0, or go on from a checkpoint.

        Args:
            folder: The checkpoint.
            step: Optimizer steps that are done.
            total: Planned steps of the run.
            per_epoch: Planned steps of an epoch.
        """
        self._reset()
        self.total, self.per_epoch, self.position = total, per_epoch, step
        self.end = -(-step // self.unit) * self.unit
        self.start = self.end - self.unit
        if folder is not None:
            self.load_state(folder)

    def next_items(self, items: Iterator[Any], num_each: int) -> list[Any]:
        """The data loader's items for the next step; [] at the end of an epoch.

        Args:
            items: Of the rest of the epoch.
            num_each: Items of a planned step.
        """
        first = list(islice(items, 1))
        if not first:
            return []
        if self.position >= self.end:
            self._begin_unit()
        return first + list(islice(items, num_each * self._taken - 1))

    def _begin_unit(self) -> None:
        self.start, self.span = self.position, self._units_at(self.position)
        self.end = self.start + self.span * self.unit

    def _units_at(self, position: int) -> int:
        """Units that one unit at this position takes: a step never goes beyond its epoch, nor beyond the end."""
        left = min(self.per_epoch - position % self.per_epoch, self.total - position)
        return min(self.factor, -(-left // self.unit))

    @property
    def _taken(self) -> int:
        """Planned steps of the step that is under way."""
        return min(self.span, self.total - self.position)

    @property
    def units(self) -> range:
        """The numbers of the generation batches that the unit under way learns from."""
        return range(self.start // self.unit, self.end // self.unit)

    @property
    def units_left(self) -> range:
        """The numbers of the generation batches that later units need."""
        return range(self.end // self.unit, self.last_unit + 1)

    @property
    def last_unit(self) -> int:
        """The number of the last generation batch of the run."""
        return (self.total - 1) // self.unit

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end, if the batch does not grow any more."""
        if self.factor == 1:
            return self.total - self.position
        inside = min(self.end, self.total) - self.position
        num_steps = -(-inside // self.span) if inside > 0 else 0
        position = max(self.end, self.position)
        while position < self.total:
            units = self._units_at(position)
            num_steps += -(-min(units * self.unit, self.total - position) // units)
            position += units * self.unit
        return num_steps

    # HuggingFace's hooks.

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts the step, and moves the schedule on: HuggingFace has moved it by one."""
        taken = self._taken
        self.position += taken
        if self.plateau is None:
            return
        state.epoch = self.position / self.per_epoch
        if not kwargs["optimizer"].step_was_skipped:
            for _ in range(taken - 1):
                kwargs["lr_scheduler"].step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Lets the batch grow if the metric has reached a plateau."""
        plateau, logs = self.plateau, kwargs["logs"]
        if plateau is None:
            return
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
                *(state.global_step, plateau.key, plateau.best, plateau.params.patience),
                *(self.factor, old, self.num_left, state.max_steps),
            )

    # Checkpoints.

    def save_state(self, folder: Path) -> None:
        """See `StatefulCallback`."""
        if self.plateau is not None:
            state = {name: getattr(self, name) for name in _STATE}
            state |= {"best": self.plateau.best, "num_since": self.plateau.num_since}
            (folder / _FILE).write_text(json.dumps(state), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """See `StatefulCallback`. A checkpoint without growth, which a resumed run may add, has no state."""
        path = folder / _FILE
        if self.plateau is not None and path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.plateau.best, self.plateau.num_since = state["best"], state["num_since"]
            for name in _STATE:
                setattr(self, name, state[name])
