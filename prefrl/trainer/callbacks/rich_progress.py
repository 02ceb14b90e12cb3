"""Shows the progress of training in the terminal."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from prefrl.printable import printable

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RichProgressCallback"]


class RichProgressCallback(TrainerCallback):
    """Shows a bar of the optimizer steps and the latest metrics, in place, on the main process.

    Set `disable_tqdm=True` beside it, so that HuggingFace's bar does not write over it.

    Args:
        console: Where to write; None: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None
        self._steps = Progress(console=self.console)
        self._latest: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if not state.is_world_process_zero:
            return
        self._steps, self._latest = Progress(console=self.console), {}
        self._steps.add_task("Training", total=state.max_steps, completed=state.global_step)
        self._live = Live(self._view(), console=self.console)
        self._live.start()
        atexit.register(self._stop)  # an error in the step must not leave the cursor hidden

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if self._live is not None:
            self._steps.update(self._steps.task_ids[0], completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """HuggingFace's hook."""
        if self._live is not None:
            self._latest |= logs or {}
            self._live.update(self._view())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop)

    def _view(self) -> Group:
        table = Table("metric", "value", box=None)
        for name, value in self._latest.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(Text(printable(name)), Text(printable(shown)))
        return Group(self._steps, table)
