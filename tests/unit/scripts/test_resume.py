"""What is around a training: imports, the panel after it, and the command that goes on with it."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prefrl.errors import ConfigError
from prefrl.registry import uncollected
from prefrl.run.checkpoints import publish, staging_folder
from prefrl.run.folder import STARTS, Identity, Start, write_identity
from prefrl.scripts import commands

OPTIONS = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "run"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a checkpoint, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    staged = staging_folder(folder) / "checkpoint-3"
    staged.mkdir(parents=True)
    (staged / "weights").write_text("1")
    publish(folder, run="r", step=3, resumable=True)
    write_identity(folder, Identity("r", {}))
    return folder


def started(folder: Path, *words: str) -> None:
    start = Start("r", "2026-01-01", shlex.join(words), {}, "")
    with (folder / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(vars(start)) + "\n")


@pytest.mark.parametrize(
    "program",
    [["prefrl"], ["prefrl", "--debug"], ["python", "-m", "prefrl"], ["python", "-m", "prefrl.scripts.main"]],
    ids=" ".join,
)
def test_the_last_command_goes_on_from_its_checkpoint(folder: Path, program: list[str]) -> None:
    started(folder, "prefrl", "dpo")
    started(folder, *program, *OPTIONS)
    assert commands.command_to_resume(Path("run")) == [*OPTIONS, "--resume_from_checkpoint", "true"]
    started(folder, *program, *OPTIONS, "--resume_from_checkpoint", "true")
    assert commands.command_to_resume(folder) == [*OPTIONS, "--resume_from_checkpoint", "true"]


@pytest.mark.parametrize(
    "script", [["-m", "prefrl.scripts.sft"], ["prefrl/scripts/sft.py"], ["-u", "/a/prefrl/scripts/sft.py"]]
)
def test_a_script_of_an_algorithm_is_resumed_by_its_command(folder: Path, script: list[str]) -> None:
    started(folder, "python", *script, *OPTIONS[1:])
    assert commands.command_to_resume(Path("run")) == [*OPTIONS, "--resume_from_checkpoint", "true"]


def test_it_runs_in_place_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(folder, "prefrl", *OPTIONS)
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(commands.os, "execv", lambda program, argv: calls.append((program, argv)))
    commands.resume(["run"])
    words = ["-m", "prefrl.scripts.main", *OPTIONS, "--resume_from_checkpoint", "true"]
    assert calls == [(sys.executable, [sys.executable, *words])]


def test_without_a_run_or_a_checkpoint_there_is_nothing_to_resume(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is not the folder of a run \(it has no starts.jsonl\)"):
        commands.command_to_resume(tmp_path / "missing")
    started(folder, "prefrl", *OPTIONS)
    (folder / "checkpoint-3/weights").write_text("damaged")
    with pytest.raises(ConfigError, match=r"the run has no complete checkpoint \(checkpoint-3: .*\). Start it again"):
        commands.command_to_resume(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python", "train.py"], r"started by `python train.py`, not by the command prefrl\. Run that again, with"),
        (["prefrl", "demo"], "started by `prefrl demo`, not by"),
        (
            ["prefrl", *OPTIONS, "--hub_token", "***"],
            r"but its secrets were not recorded\. Resume it by hand: add",
        ),
        (["prefrl", *OPTIONS[:-1], "other"], r"writes to output_dir='other' from here\. Change to the folder"),
    ],
)
def test_a_command_that_cannot_be_given_again_is_told(folder: Path, words: list[str], message: str) -> None:
    started(folder, *words)
    with pytest.raises(ConfigError, match=message):
        commands.command_to_resume(folder)


def test_what_is_imported_is_not_collected_meanwhile_nor_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    frozen = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_objects_of_a_program_that_has_imported_transformers_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    frozen = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
