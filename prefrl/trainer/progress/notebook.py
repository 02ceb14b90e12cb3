"""The view for notebooks: HuggingFace's bar, a table of what the algorithm is about, and completions below it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import HTML, display
from rich.console import Console
from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from prefrl.errors import printable
from prefrl.trainer.progress.history import number, show_banner

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.progress.history import History, Sample

_CHARACTERS = 2000  # of a prompt or a completion
_CELL = "text-align: left; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere"


class NotebookView(NotebookProgressCallback):
    """A table with a line for each log: reward, its parts, length, KL, seconds of a step.

    Below it, folded, are the best and the worst completion of the last generation batch.

    Args:
        history: What is shown.
    """

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history
        self._samples: Any = None  # IPython's handle of what is displayed below the table

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if state.is_world_process_zero:
            show_banner(Console(), self.history.facts())
        super().on_train_begin(args, state, control, **kwargs)
        self.training_tracker = NotebookTrainingTracker(state.max_steps, ["Step"])
        self._samples = None

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
        if self.history.best is not None and self.history.worst is not None:
            self._show_samples({"best": self.history.best, "worst": self.history.worst})

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
        columns, *rows = self.training_tracker.inner_table
        is_new = not rows or rows[-1][0] != step
        blank = dict.fromkeys(columns, "") if is_new else {}
        self.training_tracker.write_line(blank | {"Step": step} | values)
        columns, *rows = self.training_tracker.inner_table
        for row in rows:
            row += [""] * (len(columns) - len(row))  # there may be a new column

    def _show_samples(self, samples: dict[str, Sample]) -> None:
        """Show samples by name, in a place of their own: what is displayed anew is folded again."""
        shown = HTML(_folded(samples))  # type: ignore[no-untyped-call]  # IPython has no types
        if self._samples is None:
            self._samples = display(shown, display_id=True)  # type: ignore[no-untyped-call]  # as above
        else:
            self._samples.update(shown)


def _folded(samples: dict[str, Sample]) -> str:
    def row(name: str, sample: Sample) -> str:
        texts = (name, number(sample.reward), _cut(sample.prompt), _cut(sample.completion))
        return "".join(f'<td style="{_CELL}">{escape(text)}</td>' for text in texts)

    heading = "".join(f'<th style="{_CELL}">{title}</th>' for title in ("", "reward", "prompt", "completion"))
    rows = "".join(f"<tr>{row(name, sample)}</tr>" for name, sample in samples.items())
    return f"<details><summary>Completions</summary><table><tr>{heading}</tr>{rows}</table></details>"


def _cut(text: str) -> str:
    return printable(text, max_characters=_CHARACTERS)
