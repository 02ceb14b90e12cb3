"""HuggingFace's early stopping, whose count of evaluations is part of checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback

from prefrl import distributed
from prefrl.trainer.base.stateful_callback import StatefulCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["EarlyStopping"]

_log = logging.getLogger(__name__)

_FILE = "early_stopping.json"


class EarlyStopping(EarlyStoppingCallback, StatefulCallback):
    """See HuggingFace's class, which forgets its count in a resumed run unless an option of its own is set."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts to count, or ends a run that had ended early when its checkpoint was written."""
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
        self._stop(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """Counts, and ends training after too many evaluations without an improvement."""
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
        count = {"evaluations_without_improvement": self.early_stopping_patience_counter}
        (folder / _FILE).write_text(json.dumps(count), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """See `StatefulCallback`. A resumed run may begin to count."""
        path = folder / _FILE
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.early_stopping_patience_counter = state.get("evaluations_without_improvement", 0)
