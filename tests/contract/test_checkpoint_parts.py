"""Checkpoints at another place, and checkpoints without the optimizer's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.run.uploads import Uploads
from tests.contract.cases import dataset_of, make_trainer, weights_of

URL = "memory://bucket/run"
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def memory() -> Any:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


def train(folder: Path, resume: Any = None, *, algorithm: str = "sft", **options: Any) -> Any:
    trainer = make_trainer(algorithm, folder, **{"max_steps": 3, **SAVING, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a: Any, b: Any) -> bool:
    x, y = weights_of(a.model), weights_of(b.model)
    return all(torch.equal(x[name], y[name]) for name in x)


def steps_of(trainer: Any) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def uploaded(memory: Any) -> list[str]:
    return sorted(Path(path).parent.name for path in memory.find("/bucket/run") if path.endswith("manifest.json"))


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
@pytest.mark.parametrize("resume", [True, f"{URL}/checkpoint-2"])
def test_a_run_whose_disk_is_gone_resumes_from_what_was_uploaded(
    algorithm: str, resume: Any, tmp_path: Path, memory: Any
) -> None:
    whole = train(tmp_path / "whole", algorithm=algorithm)
    # The schedule is constant, so two steps of a run of three are a run of two.
    train(tmp_path / "first", True, algorithm=algorithm, max_steps=2, upload_to=URL)
    assert uploaded(memory) == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(tmp_path / "first")
    to = URL if resume is True else None
    resumed = train(tmp_path / "second", resume, algorithm=algorithm, upload_to=to)
    assert steps_of(resumed) == [1, 2, 3]
    assert (tmp_path / "second" / "checkpoint-2").is_dir()
    assert not (tmp_path / "second" / "checkpoint-1").exists()
    assert same(resumed, whole)
    assert uploaded(memory)[-1] == ("checkpoint-3" if resume is True else "checkpoint-2")


def test_the_best_checkpoint_is_fetched_and_loaded_at_the_end(tmp_path: Path, memory: Any) -> None:
    rising = iter([1.0, 0.5, 2.0, 3.0])
    options = {
        **{"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset_of("sft", 4)},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "upload_to": URL, "max_steps": 4},
    }

    def make(folder: Path, **others: Any) -> Any:
        trainer = make_trainer("sft", folder, **SAVING | options | others)
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: {**evaluate(*a, **k), "eval_loss": next(rising)}
        return trainer

    make(tmp_path / "first", allow_resume_changes=["max_steps"], max_steps=3).train()
    saved = load_file(tmp_path / "first" / "checkpoint-2" / "model.safetensors")
    shutil.rmtree(tmp_path / "first")
    resumed = make(tmp_path / "second")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "second" / "checkpoint-2")
    found = dict(resumed.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert not (tmp_path / "second" / "checkpoint-1").exists()


@pytest.mark.parametrize("word", ["auto", "true"])
def test_auto_goes_on_if_there_is_a_checkpoint_and_disable_starts_anew(word: str, tmp_path: Path) -> None:
    train(tmp_path, "Auto", max_steps=1)
    assert steps_of(train(tmp_path, word, max_steps=2)) == [1, 2]
    assert json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["step"] == 2
    last = (tmp_path / "checkpoint-2").stat().st_mtime_ns
    assert steps_of(train(tmp_path, "disable", max_steps=1)) == [1]
    assert (tmp_path / "checkpoint-2").stat().st_mtime_ns == last


def test_a_path_is_a_place(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=1, upload_to=tmp_path / "mounted")
    assert (tmp_path / "mounted" / "checkpoint-1" / "manifest.json").is_file()


def test_local_checkpoints_come_before_uploaded_ones(tmp_path: Path, memory: Any) -> None:
    train(tmp_path, max_steps=2, upload_to=URL)
    shutil.rmtree(tmp_path / "checkpoint-2")
    fetched = train(tmp_path, True, max_steps=2, upload_to=URL)
    assert fetched.state.global_step == 2
    assert not [path for path in memory.find("/bucket/run") if "uploading" in path]


def test_a_run_that_began_anew_does_not_go_on_with_an_earlier_one(tmp_path: Path, memory: Any) -> None:
    train(tmp_path / "first", max_steps=2, upload_to=URL)
    train(tmp_path / "second", "disable", max_steps=1)
    shutil.rmtree(tmp_path / "second" / "checkpoint-1")
    assert steps_of(train(tmp_path / "second", "auto", max_steps=1, upload_to=URL)) == [1]
    assert not (tmp_path / "second" / "checkpoint-2").exists()


def test_final_uploads_the_last_checkpoint_alone_once_training_is_complete(tmp_path: Path, memory: Any) -> None:
    final = {"upload_to": URL, "upload_kwargs": {"checkpoints": "final"}}
    with pytest.raises(SystemExit):
        train(tmp_path, max_train_time=1e-9, **final)
    assert uploaded(memory) == []
    train(tmp_path, True, **final)
    assert uploaded(memory) == ["checkpoint-3"]


def test_a_place_that_is_out_of_reach_ends_no_training_and_the_next_start_completes_the_uploads(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: Any) -> None:
        raise ConnectionError("is out of reach")

    monkeypatch.setitem(Uploads.__init__.__kwdefaults__, "pauses", ())
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "pipe_file", put)
        trainer = train(tmp_path, max_steps=2, upload_to=URL, upload_kwargs={"timeout": 60.0})
    assert trainer.state.global_step == 2
    told = caplog.records[-1].getMessage()
    assert told.startswith(f"not uploaded to {URL}:\n  checkpoint-1: ConnectionError: is out of reach\n  checkpoint-2")
    assert uploaded(memory) == []
    train(tmp_path, True, max_steps=2, upload_to=URL)
    assert uploaded(memory) == ["checkpoint-1", "checkpoint-2"]


def test_a_place_that_cannot_be_read_is_no_reason_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ls(*_: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(ConfigError, match=r"upload_to='memory://bucket/run' cannot be read: PermissionError: Access"):
        train(tmp_path, True, upload_to=URL)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='memory://bucket/run' cannot be read"):
        train(tmp_path, URL)


def test_a_url_without_checkpoints_is_an_error_and_true_starts_at_step_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='memory://nothing': there is no checkpoint"):
        train(tmp_path, "memory://nothing")
    assert train(tmp_path, True, max_steps=1, upload_to=URL).state.global_step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upload_kwargs": {"timeout": 1.0}}, r"upload_kwargs=.* has no effect because upload_to=None"),
        ({"upload_to": URL, "upload_kwargs": {"timeout": 0.0}}, r"upload_kwargs: timeout=0.0: must be a number > 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer("sft", tmp_path, **SAVING | options)


# Without the optimizer's state.


def test_a_checkpoint_without_the_optimizer_goes_on_at_its_step_with_new_moments(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "linear", "max_steps": 4}
    whole = train(tmp_path / "whole", **options)
    parts = tmp_path / "parts"
    train(parts, **options, checkpoint_kwargs={"save_optimizer": False})
    assert not list(parts.rglob("optimizer.pt"))
    for step in (3, 4):
        shutil.rmtree(parts / f"checkpoint-{step}")
    with pytest.raises(ConfigError, match=r"checkpoint-2 holds no optimizer state.*load_optimizer': False"):
        train(parts, True, **options)
    changed = {"learning_rate": 0.02, "allow_resume_changes": ["learning_rate"]}
    resumed = train(parts, True, **options | changed, checkpoint_kwargs={"load_optimizer": False})
    logs = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx([0.01, 0.0075, 0.01, 0.005])
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {2.0}  # of Adam, since resumed
    assert logs[2]["loss"] == next(e["loss"] for e in whole.state.log_history if e["step"] == 3)  # the same rows
    assert not same(resumed, whole)


def test_the_schedule_of_the_weight_decay_goes_on_without_the_optimizer(tmp_path: Path) -> None:
    options = {"weight_decay": 0.1, "weight_decay_schedule": "linear", "max_steps": 4}
    train(tmp_path, **options)
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-3")
    seen = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            seen.append(optimizer.param_groups[0]["weight_decay"])

    whole = make_trainer("sft", tmp_path / "whole", **SAVING | options)
    whole.add_callback(Watch())
    whole.train()
    expected, seen[:] = seen[2:], []
    assert expected[0] != 0.1
    resumed = make_trainer("sft", tmp_path, **SAVING | options, checkpoint_kwargs={"load_optimizer": False})
    resumed.add_callback(Watch())
    resumed.train(resume_from_checkpoint=True)
    assert seen == expected


def test_whole_weights_are_exported_where_they_are_not_anyway(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export_weights=True has no effect"):
        train(tmp_path, checkpoint_kwargs={"export_weights": True})


def test_a_whole_checkpoint_can_be_read_without_its_optimizer(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    resumed = train(tmp_path, True, checkpoint_kwargs={"load_optimizer": False})
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {1.0}


def test_a_schedule_that_may_change_is_that_of_the_config(tmp_path: Path) -> None:
    train(tmp_path, lr_scheduler_type="linear", max_steps=2)
    names = ["lr_scheduler_type", "max_steps", "num_train_epochs"]
    options = {"lr_scheduler_type": "constant", "allow_resume_changes": names}
    resumed = train(tmp_path, True, max_steps=4, **options)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01, 0.005, 0.01, 0.01])
