"""What shows a run: lines, or a view that replaces HuggingFace's, the file of its metrics, and trackers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from prefrl.printable import printable, reason_of
from prefrl.run.records import METRICS_FILE, append_metrics
from prefrl.trainer.progress.history import duration, number, show_banner
from prefrl.trainer.progress.live import RichProgressCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    from prefrl.trainer.progress.history import History, Row

__all__ = [
    "LineView",
    "Recorder",
    "add_views",
    "closed_at_end",
    "contain_trackers",
    "line",
]


_log = logging.getLogger(__name__)

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


# Where HuggingFace keeps its trackers. A user's own callbacks are elsewhere, even if they inherit from one of these.
_TRACKERS = "transformers.integrations."
_EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def contain_trackers(callbacks: Iterable[TrainerCallback]) -> None:
    """Turn the first error of each tracker into a warning, and leave the tracker out from then on.

    Args:
        callbacks: Of a trainer. Those that are not HuggingFace's trackers stay as they are.
    """
    for callback in callbacks:
        if type(callback).__module__.startswith(_TRACKERS):
            for event in _EVENTS:
                setattr(callback, event, partial(_tell, callback, getattr(callback, event)))


def _tell(tracker: TrainerCallback, tell: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tell a tracker about an event."""
    try:
        return tell(*args, **kwargs)
    except Exception as error:
        _log.warning("%s failed and is disabled for the rest of the run: %s", type(tracker).__name__, reason_of(error))
        for event in _EVENTS:
            setattr(tracker, event, _ignore)
        return None


def _ignore(*_: Any, **__: Any) -> None: ...


def add_views(handler: CallbackHandler, history: History, *, run: Callable[[], str]) -> None:
    """Record each log, and replace the callback with which HuggingFace shows them.

    Each view inherits from the callback that it replaces, so `trainer.remove_callback(PrinterCallback)` removes it.

    Args:
        handler: Of a trainer. A `RichProgressCallback` that the user has passed stays the only view.
        history: What the views show.
        run: Returns the id of the run.
    """
    callbacks = handler.callbacks
    own = [callback for callback in callbacks if isinstance(callback, RichProgressCallback)]
    for callback in own:
        callback.history = history
    # HuggingFace has added its own after those of the user, who may have passed another of the kind.
    place = max(i for i, callback in enumerate(callbacks) if _is_huggingfaces(callback))
    view = [] if own else [_view_instead_of(callbacks[place], history)]
    callbacks[place : place + 1] = [Recorder(history, run), *view]


def _is_huggingfaces(callback: TrainerCallback) -> bool:
    return type(callback) in (PrinterCallback, ProgressCallback) or _is_of_notebooks(callback)


def _is_of_notebooks(callback: TrainerCallback) -> bool:
    return type(callback).__name__ == "NotebookProgressCallback"  # whose module needs IPython


def _view_instead_of(callback: TrainerCallback, history: History) -> TrainerCallback:
    if _is_of_notebooks(callback):
        from prefrl.trainer.progress.notebook import NotebookView  # needs IPython

        return NotebookView(history)
    if isinstance(callback, ProgressCallback) and Console().is_terminal:
        view = RichProgressCallback()
        view.history = history
        return view
    return LineView(history)


@contextmanager
def closed_at_end(handler: CallbackHandler) -> Iterator[None]:
    """Close live views when training ends, also with an error, so that they leave the terminal as it was."""
    try:
        yield
    finally:
        for callback in handler.callbacks:
            if isinstance(callback, RichProgressCallback):
                callback.close()
