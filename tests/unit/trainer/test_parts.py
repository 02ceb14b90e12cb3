"""Optional parts of a training: who hears which event, and that a run without options has none but the guard."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.trainer.features.guard import Guard
from prefrl.trainer.features.intervals import EpochIntervals
from prefrl.trainer.parts import Events, Part, Parts
from tests.contract.cases import make_trainer


class Early(Part):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def begin(self, run: Any) -> None:
        self.heard.append(f"{type(self).__name__} begins")


class Late(Early):
    def ended(self, run: Any) -> None:
        self.heard.append(f"{type(self).__name__} ends")


def test_parts_hear_the_events_that_they_define_in_the_order_of_their_list() -> None:
    heard: list[str] = []
    parts = Parts([Early(heard)])
    parts.add(Late(heard))
    run: Any = SimpleNamespace(parts=parts)
    events = Events(run, begin=lambda: heard.append("the core begins"), end=lambda: heard.append("the core ends"))
    events.on_train_begin()
    events.on_epoch_end()  # which nobody hears
    events.on_train_end()
    assert heard == ["Early begins", "Late begins", "the core begins", "Late ends", "the core ends"]


def test_answers_come_in_the_same_order_and_a_part_that_is_off_is_said_to_be() -> None:
    class Says(Part):
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def may_save(self, run: Any) -> bool:
            return self.answer

    run: Any = None
    parts = Parts([Says(True), Part(), Says(False)])
    assert parts.tell("may_save", run) == [True, False]
    assert parts.other_weights(run) == []
    assert parts.get(Late) is None
    with pytest.raises(KeyError, match="Late"):
        parts[Late]


def test_a_run_without_options_has_no_part_but_the_guard(tmp_path: Path) -> None:
    plain = make_trainer("sft", tmp_path / "plain").parts
    assert [type(part) for part in plain._parts] == [Guard]
    by_epochs = make_trainer("sft", tmp_path / "epochs", save_strategy="epoch").parts
    assert [type(part) for part in by_epochs._parts] == [EpochIntervals, Guard]


def test_parts_of_models_hear_of_each_model_before_a_backend_and_a_later_part_is_around_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Around(Part):
        def __init__(self, name: str) -> None:
            self.name = name

        def made(self, run: Any, model: Any, role: str) -> None:
            heard.append(f"{self.name} {role}")

        def around_loss(self, run: Any, batch: Any, compute: Any) -> Any:
            heard.append(f"{self.name} begins")
            output = compute()
            heard.append(f"{self.name} ends")
            return output

    monkeypatch.setattr("prefrl.trainer.base_trainer.parts_of_models", lambda args, model: [Around("1"), Around("2")])
    trainer = make_trainer("dpo", tmp_path, max_steps=1)
    assert heard == ["1 policy", "2 policy", "1 reference", "2 reference"]
    trainer.train()
    assert heard[4:8] == ["2 begins", "1 begins", "1 ends", "2 ends"]
