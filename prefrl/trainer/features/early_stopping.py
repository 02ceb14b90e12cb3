"""Ends training when evaluations no longer improve.

It is a callback and not a part: HuggingFace keeps the state of its class in trainer_state.json.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback

from prefrl import distributed
from prefrl.trainer.checkpointing import StatefulCallback
from prefrl.trainer.evaluation import best_metric

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.parts import Run

_log = logging.getLogger(__name__)

_FILE = "early_stopping.json"


def add_early_stopping(run: Run) -> None:
    """Add the callback if the options ask for it."""
    patience = run.args.early_stopping_patience
    if patience is not None:
        run.add_callback(EarlyStopping(patience, run.args.early_stopping_params.threshold))


class EarlyStopping(EarlyStoppingCallback, StatefulCallback):
    """See HuggingFace's class. This one counts evaluations after new steps only, and goes on in a resumed run.

    Evaluations of other datasets and other weights, which lack the metric, do not count.
    """

    _last_step = 0  # that was evaluated and counted

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts to count, or ends a run that had ended early when its checkpoint was written."""
        if state.global_step == 0:
            self.early_stopping_patience_counter = self._last_step = 0
        self._stop(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """Counts, and ends training after too many evaluations without an improvement."""
        if best_metric(args) not in metrics or state.global_step <= self._last_step:
            return
        self._last_step = state.global_step
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if self._stop(control) and distributed.is_main():
            _log.warning(
                "step %d: training stops early: %s has not improved on %s in %d evaluations",
                *(state.global_step, args.metric_for_best_model, state.best_metric, self.early_stopping_patience),
            )

    def _stop(self, control: TrainerControl) -> bool:
        if self.early_stopping_patience_counter < self.early_stopping_patience:
            return False
        control.should_training_stop = True
        return True

    def save_state(self, folder: Path) -> None:
        """See `StatefulCallback`."""
        count = {"num_without_improvement": self.early_stopping_patience_counter, "last_step": self._last_step}
        (folder / _FILE).write_text(json.dumps(count), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """See `StatefulCallback`. A resumed run may begin to count."""
        path = folder / _FILE
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.early_stopping_patience_counter = state.get("num_without_improvement", 0)
        self._last_step = state.get("last_step", 0)
