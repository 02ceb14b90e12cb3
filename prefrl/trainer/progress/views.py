"""What shows a run: lines, or a view that replaces HuggingFace's, and trackers."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import is_in_notebook
from transformers.utils import logging as transformers_logging

from prefrl.errors import printable, reason_of
from prefrl.trainer.progress.history import (
    History,
    LineView,
    Recorder,
    Sample,
    duration,
    number,
    show_banner,
    sparkline,
)

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

_log = logging.getLogger(__name__)

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


def hide_bars_in_files() -> None:
    """Keep bars of libraries out of pipes and files, in which each update is a line, from now on."""
    if not sys.stderr.isatty() and not is_in_notebook():
        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()


def are_shown(handler: CallbackHandler) -> bool:
    """Whether there is a view: a user may have removed it."""
    kinds = (LineView, RichProgressCallback)
    # The module of the view for notebooks needs IPython.
    return any(isinstance(shown, kinds) or type(shown).__name__ == "NotebookView" for shown in handler.callbacks)


@contextmanager
def closed_at_end(handler: CallbackHandler) -> Iterator[None]:
    """Close live views when training ends, also with an error, so that they leave the terminal as it was.

    Meanwhile transformers draws no bars of its own, which would tear the view at each checkpoint.
    """
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            transformers_logging.enable_progress_bar()
        for callback in handler.callbacks:
            if isinstance(callback, RichProgressCallback):
                callback.close()


_BAR = 24  # characters of the longest bars
_CHARACTERS, _LINES = 300, 4  # of a completion or the end of a prompt


class RichProgressCallback(ProgressCallback):
    """Shows progress, time left, metrics, where the time goes, and two completions, all updated in place.

    Trainers use it by themselves on a terminal. Passed in `callbacks`, it is used wherever the output goes.

    Args:
        console: Where to write. The default is standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console()
        self.history = History()  # the trainer sets its own
        self._live: Live | None = None
        self._step = 0
        self._is_evaluating = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if not state.is_world_process_zero:
            return
        show_banner(self.console, self.history.facts())
        self._step, self._is_evaluating = state.global_step, False
        self._live = Live(get_renderable=self.view, console=self.console, refresh_per_second=4)
        self._live.start()
        atexit.register(self.close)  # an error in the step must not leave the cursor hidden

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self._step = state.global_step

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
            self._live.refresh()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *_: Any, **kwargs: Any
    ) -> None:
        """HuggingFace's hook; outside of training, HuggingFace's bar is shown."""
        self._is_evaluating = self._live is not None
        if not self._is_evaluating:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self._is_evaluating = False
        super().on_evaluate(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        self.close()

    def close(self) -> None:
        """Stop updating; what was shown last stays on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.close)

    def view(self) -> Group:
        """All that is shown now."""
        parts: list[RenderableType] = [self._bar()]
        if self.history.rows:
            beside = Table.grid(padding=(0, 4))
            beside.add_row(self._metrics(), self._times())
            parts += ["", beside]
        if self.history.best is not None and self.history.worst is not None:
            parts += ["", _samples(self.history.best, self.history.worst)]
        return Group(*parts)

    def _bar(self) -> Table:
        """The steps that are done, the time, and what the run is doing."""
        step, total = self._step, self.history.total
        phase = "evaluation" if self._is_evaluating else (self.history.phase() or "").replace("_", " ")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text("Training", style="bold"),
            ProgressBar(total, step, width=_BAR),
            f"{step}/{total}",
            f"{step / max(total, 1):.0%}",
            duration(self.history.seconds),
            f"{duration(self.history.seconds_left(step))} left",
            Text(phase, style="cyan"),
        )
        return bar

    def _metrics(self) -> Table:
        """The latest values, with their course so far."""
        last = self.history.rows[-1]
        table = Table("", f"step {last.step}", "so far", box=None, padding=(0, 2))
        table.columns[1].justify = "right"
        for title in self.history.titles:
            table.add_row(title, *self._course(title))
            if title == "reward":
                for name in last.rewards:
                    table.add_row(Text(f"  {printable(name)}", style="dim"), *self._course(name))
        for row in self.history.evaluations[-1:]:
            for title, value in row.values.items():
                table.add_row(Text(printable(f"evaluation {title}")), number(value), f"step {row.step}")
        return table

    def _course(self, title: str) -> tuple[str, Text]:
        values = self.history.series(title)
        return number(values[-1] if values else None), Text(sparkline(values), style="green")

    def _times(self) -> Table:
        """Where the time of a step goes, the longest phase first."""
        last = self.history.rows[-1]
        table = Table("", f"{number(last.step_s)} s/step", "", box=None, padding=(0, 2))
        table.columns[1].justify = "right"
        whole = sum(last.phases.values())
        for phase, seconds in sorted(last.phases.items(), key=lambda item: -item[1]):
            if seconds >= 0.01 * whole > 0:
                bar = Text("\u2588" * max(1, round(_BAR * seconds / whole)), style="blue")
                table.add_row(phase.replace("_", " "), f"{seconds / whole:.0%}", bar)
        return table


def _samples(best: Sample, worst: Sample) -> Table:
    table = Table("", "reward", "prompt", "completion", box=None, padding=(0, 2))
    for name, sample in {"best": best, "worst": worst}.items():
        shortened = (
            Text(printable(sample.prompt[-_CHARACTERS:], max_lines=_LINES), style="dim"),
            Text(printable(sample.completion, max_characters=_CHARACTERS, max_lines=_LINES)),
        )
        table.add_row(name, number(sample.reward), *shortened)
    return table
