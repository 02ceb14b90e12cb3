"""Trackers, which `report_to` names: one that fails must not end the run that it reports on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers import TrainerCallback

from prefrl.printable import reason_of

__all__ = ["contain_trackers"]

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
