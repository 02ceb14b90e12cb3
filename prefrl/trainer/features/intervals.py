"""Evaluations and checkpoints several times an epoch, or every few epochs."""

from __future__ import annotations

import math
from typing import Literal

from prefrl.trainer.base_config import BaseConfig
from prefrl.trainer.parts import Part, Run

What = Literal["evaluate", "save"]


def epoch_intervals(args: BaseConfig) -> EpochIntervals | None:
    """What asks for evaluations and checkpoints by epochs, if a strategy is "epoch"."""
    return EpochIntervals(args) if "epoch" in (args.eval_strategy, args.save_strategy) else None


class EpochIntervals(Part):
    """Evaluates every `eval_epochs` and saves every `save_epochs` epochs, where the strategy is "epoch".

    HuggingFace does both at the end of each epoch and of training. Between the ends of epochs, the step that completes
    an interval does; other epochs' ends do not. The end of training always does.

    Args:
        args: Options.
    """

    def __init__(self, args: BaseConfig) -> None:
        self._intervals: dict[What, float] = {}
        if args.eval_strategy == "epoch":
            self._intervals["evaluate"] = args.eval_epochs
        if args.save_strategy == "epoch":
            self._intervals["save"] = args.save_epochs
        self._passed: dict[What, int] = {}  # how many intervals are complete
        self._done: dict[What, int] = {}  # the last step that asked for it

    def begin(self, run: Run) -> None:
        """A resumed run goes on counting at its epoch."""
        epoch = run.state.epoch or 0.0
        self._passed = {what: _complete(epoch, interval) for what, interval in self._intervals.items()}
        self._done = dict.fromkeys(self._intervals, -1)

    def after_step(self, run: Run) -> None:
        """Asks for what is due between the ends of epochs."""
        epoch = run.state.epoch or 0.0
        if run.control.should_training_stop or epoch == int(epoch):
            return  # `epoch_ended` follows
        for what in self._intervals:
            is_early = what == "evaluate" and epoch < run.args.eval_delay
            if self._completes(what, epoch) and not is_early:
                setattr(run.control, f"should_{what}", True)
                self._done[what] = run.state.global_step

    def epoch_ended(self, run: Run) -> None:
        """Takes back what is not due."""
        for what in self._intervals:
            is_due = self._completes(what, run.state.epoch or 0.0) or run.control.should_training_stop
            if not is_due or self._done[what] == run.state.global_step:
                setattr(run.control, f"should_{what}", False)

    def _completes(self, what: What, epoch: float) -> bool:
        before, self._passed[what] = self._passed[what], _complete(epoch, self._intervals[what])
        return self._passed[what] > before


def _complete(epoch: float, interval: float) -> int:
    return math.floor(epoch / interval + 1e-9)
