"""Evaluations and checkpoints several times an epoch, or every few epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.base.config import BaseConfig

__all__ = ["EpochIntervals"]

What = Literal["evaluate", "save"]


class EpochIntervals(TrainerCallback):
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook. A resumed run goes on counting at its epoch."""
        self._passed = {what: _complete(state.epoch or 0.0, epochs) for what, epochs in self._intervals.items()}
        self._done = dict.fromkeys(self._intervals, -1)

    def on_step_end(self, args: BaseConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        epoch = state.epoch or 0.0
        if control.should_training_stop or epoch == int(epoch):
            return  # `on_epoch_end` follows
        for what in self._intervals:
            is_early = what == "evaluate" and epoch < args.eval_delay
            if self._completes(what, epoch) and not is_early:
                setattr(control, f"should_{what}", True)
                self._done[what] = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook, after its own callback has asked for both."""
        for what in self._intervals:
            is_due = self._completes(what, state.epoch or 0.0) or control.should_training_stop
            if not is_due or self._done[what] == state.global_step:
                setattr(control, f"should_{what}", False)

    def _completes(self, what: What, epoch: float) -> bool:
        before, self._passed[what] = self._passed[what], _complete(epoch, self._intervals[what])
        return self._passed[what] > before


def _complete(epoch: float, interval: float) -> int:
    return math.floor(epoch / interval + 1e-9)
