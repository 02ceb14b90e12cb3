"""The view for notebooks: HuggingFace's bar, with a table of what the algorithm is about instead of its loss alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from prefrl.trainer.progress.banner import show_banner
from prefrl.trainer.progress.history import number

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.progress.history import History

__all__ = ["NotebookView"]


class NotebookView(NotebookProgressCallback):
    """A table with a line for each log: reward, its parts, length, KL, seconds of a step.

    Args:
        history: What is shown.
    """

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if state.is_world_process_zero:
            show_banner(Console(), self.history.facts())
        super().on_train_begin(args, state, control, **kwargs)
        self.training_tracker = NotebookTrainingTracker(state.max_steps, ["Step"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if logs is None or "loss" not in logs or self.training_tracker is None or not self.history.rows:
            return
        row = self.history.rows[-1]
        values = row.values | row.rewards | ({} if row.step_s is None else {"s/step": row.step_s})
        self._write(state.global_step, {title: number(value) for title, value in values.items()})

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if self.training_tracker is None:
            super().on_evaluate(args, state, control, **kwargs)
            return
        if self.history.evaluations:
            values = self.history.evaluations[-1].values
            self._write(state.global_step, {f"evaluation {title}": number(v) for title, v in values.items()})
        self.training_tracker.remove_child()
        self.prediction_bar, self._force_next_update = None, True

    def _write(self, step: int, values: dict[str, str]) -> None:
        columns = self.training_tracker.inner_table[0]
        blank = dict.fromkeys(columns, "")
        self.training_tracker.write_line(blank | {"Step": step} | values)
