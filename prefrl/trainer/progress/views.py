"""Chooses the view of a run: a table in notebooks, a live view on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from prefrl.trainer.progress.lines import LineView
from prefrl.trainer.progress.live import RichProgressCallback
from prefrl.trainer.progress.recorder import Recorder

if TYPE_CHECKING:
    from transformers.trainer_callback import CallbackHandler

    from prefrl.trainer.progress.history import History

__all__ = ["add_views", "closed_at_end"]


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
