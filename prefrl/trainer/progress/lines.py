"""The view for files, pipes and logs of jobs: one aligned line for each log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback

from prefrl.printable import printable
from prefrl.trainer.progress.banner import show_banner
from prefrl.trainer.progress.history import duration, number

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.progress.history import History, Row

__all__ = ["LineView", "line"]

_WIDTH = 9  # of a number with four digits, such as 1.234e-05


class LineView(PrinterCallback):
    """Prints the latest row of a history as a line, in place of the dictionary that HuggingFace prints.

    Args:
        history: What is shown.
        console: Where to write; None: standard output, as it is then.
    """

    def __init__(self, history: History, console: Console | None = None) -> None:
        super().__init__()
        self.history = history
        self._console = console

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if state.is_world_process_zero:
            show_banner(self._console or Console(), self.history.facts())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if not state.is_world_process_zero or logs is None:
            return
        rows = self.history.rows if "loss" in logs else self.history.evaluations
        if rows and ("loss" in logs or any(name.startswith("eval_") for name in logs)):
            text = line(self.history, rows[-1])
            (self._console or Console()).print(Text(printable(text)), soft_wrap=True)


def line(history: History, row: Row) -> str:
    """A row as a line: the step, the values with their names and, for training steps, their time and the time left."""
    start = f"step {row.step:>{len(str(history.total))}}/{history.total}"
    if row in history.evaluations:
        return "  ".join([start, "evaluation", *(f"{title} {number(value)}" for title, value in row.values.items())])
    values = {title: row.values.get(title) for title in history.titles} | row.rewards
    cells = [f"{title} {number(value):>{_WIDTH}}" for title, value in values.items()]
    left = f"{duration(history.seconds_left(row.step))} left"
    return "  ".join([start, *cells, f"{number(row.step_s):>6} s/step", left])
