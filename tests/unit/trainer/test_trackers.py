"""A tracker of HuggingFace that fails is left out with one warning; a user's callback that fails ends the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import WandbCallback

from tests.contract.cases import make_trainer

SECRET = "hf_abcdefghijklmnopqrstuvwx"


class Own(WandbCallback):
    """A user's callback, although it inherits from a tracker."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_log(self, *_: Any, **__: Any) -> None:
        self.heard.append("log")
        raise RuntimeError("mine")

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...

    on_train_end = on_train_begin


class Tracker(Own):
    """As if it were one of HuggingFace's own."""


Tracker.__module__ = WandbCallback.__module__


class Listener(TrainerCallback):
    """Behind a tracker that fails, others still hear of everything."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_log(self, *_: Any, **__: Any) -> None:
        self.heard.append("log")


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker, listener = Tracker(), Listener()
    trainer = make_trainer("sft", tmp_path, max_steps=3, callbacks=[tracker, listener])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    assert tracker.heard == ["log"]
    assert listener.heard == ["log"] * 4  # three steps, and the summary
    told = [record.getMessage() for record in caplog.records if "Tracker" in record.getMessage()]
    assert told == ["Tracker failed and is disabled for the rest of the run: RuntimeError: mine"]


def test_a_tracker_may_fail_as_training_begins_and_tells_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refused(Tracker):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise OSError(f"no network for https://me:{SECRET}@host")

    Refused.__module__ = WandbCallback.__module__
    tracker = Refused()
    make_trainer("sft", tmp_path, callbacks=[tracker]).train()
    assert tracker.heard == []
    assert "Refused failed" in caplog.text
    assert SECRET not in caplog.text


def test_a_users_callback_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer("sft", tmp_path, callbacks=[Own()]).train()
