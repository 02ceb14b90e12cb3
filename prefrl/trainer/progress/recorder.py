"""Records the logs of a run: in the history that the views show, and in `metrics.jsonl`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from prefrl.printable import reason_of
from prefrl.run.records import METRICS_FILE, append_metrics

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.progress.history import History

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """Adds each log to a history and, on the main process, to the file of the run.

    Args:
        history: What the views show.
        run: Returns the id of the run.
    """

    def __init__(self, history: History, run: Callable[[], str]) -> None:
        self.history = history
        self._run = run
        self._is_writing = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self.history.begin(step=state.global_step, total=state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if logs is None or not state.is_world_process_zero:
            return
        self.history.add(state.global_step, logs)
        if not self._is_writing:
            return
        about = {"run": self._run(), "step": state.global_step, "time": round(time.time(), 3), "epoch": state.epoch}
        try:
            append_metrics(Path(args.output_dir), about | logs)
        except OSError as error:
            self._is_writing = False
            _log.warning("%s cannot be written, so it ends here: %s", METRICS_FILE, reason_of(error))
