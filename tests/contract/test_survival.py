"""What a killed run leaves behind, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import CheckpointError, ConfigError, RewardError
from prefrl.run.checkpoints import find_last, problem_of
from tests.contract.cases import assert_same_weights, dataset_of, make_trainer, ragged_reward, weights_of
from tests.contract.survival_worker import forked
from tests.launch import run_module

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def test_runs_that_are_killed_at_random_moments_end_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    kills = {"grpo": 4, "dpo": 1, "ppo": 1, "rloo": 2}
    argv = [str(item) for pair in kills.items() for item in pair]
    results = json.loads(run_module("tests.contract.survival_worker", tmp_path, *argv).splitlines()[-1])
    assert {result["name"]: result["kills"] for result in results} == kills
    for result in results:
        assert set(result["killed"]) == {result["whole"]}, result
        assert result["scored_again"] == []


# Operations on names that Python announces before they happen. Files are written by several libraries, but nobody
# reads them before the folder that holds them is renamed.
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree")


class DiesAtOperation:
    """An audit hook that ends the process before its n-th operation on files below a folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = str(folder)
        self.left = number

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's hook."""
        if event in OPERATIONS and self.folder in str(arguments[0]):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class SavesAndDies(TrainerCallback):
    """At the second checkpoint: save it in forks that die at each operation in turn, and look at what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Any = None
        self.last: list[str | None] = []  # the last whole checkpoint that each fork has left

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step != 2:
            return
        before = self.folder.with_name("before")
        shutil.copytree(self.folder, before)
        number, status = 0, -signal.SIGKILL
        while status == -signal.SIGKILL:
            number += 1
            status = forked(partial(self.save, DiesAtOperation(self.folder, number)))
            found = find_last(self.folder, run=None)
            assert not found.unusable
            self.last.append(found.folder and found.folder.name)
            shutil.rmtree(self.folder)
            shutil.copytree(before, self.folder)
        assert status == 0

    def save(self, hook: DiesAtOperation) -> None:
        """Save a checkpoint while the hook watches."""
        sys.addaudithook(hook)
        self.trainer._save_checkpoint(self.trainer.model, None)


def test_a_kill_at_any_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Also when the checkpoint before it is removed."""
    run = tmp_path / "run"
    saves = SavesAndDies(run)
    trainer = make_trainer("grpo", run, **SAVING, max_steps=2, save_total_limit=1)
    trainer.add_callback(saves)
    saves.trainer = trainer
    trainer.train()
    assert len(saves.last) > 30
    first = saves.last.index("checkpoint-2")
    assert set(saves.last[:first]) == {"checkpoint-1"}
    assert set(saves.last[first:]) == {"checkpoint-2"}
    assert problem_of(run / "checkpoint-2") is None


def test_a_checkpoint_that_was_sealed_but_not_moved_is_found_by_the_next_run(tmp_path: Path) -> None:
    make_trainer("sft", tmp_path, **SAVING, max_steps=2).train()
    (tmp_path / ".saving").mkdir()
    inode = (tmp_path / "checkpoint-2").stat().st_ino
    (tmp_path / "checkpoint-2").rename(tmp_path / ".saving" / "checkpoint-2")
    resumed = make_trainer("sft", tmp_path, **SAVING, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-2").stat().st_ino == inode  # it was not made again
    assert not (tmp_path / ".saving").exists()


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer("grpo", tmp_path, **SAVING, max_steps=2).train()
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    resumed = make_trainer("grpo", tmp_path, **SAVING, max_steps=2)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        resumed.train(resume_from_checkpoint=str(weights.parent))
    resumed.train(resume_from_checkpoint=True)
    assert "skips checkpoint-2: model.safetensors is damaged" in caplog.text
    assert problem_of(weights.parent) is None  # step 2 was made again


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    class Starts(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            def start() -> None:
                with pytest.raises(ConfigError, match=rf"process {os.getppid()} on host"):
                    make_trainer("sft", tmp_path, max_steps=1).train()

            assert forked(start) == 0

    trainer = make_trainer("sft", tmp_path, max_steps=1)
    trainer.add_callback(Starts())
    trainer.train()


def test_a_new_run_does_not_go_on_from_another_runs_checkpoint(tmp_path: Path) -> None:
    make_trainer("sft", tmp_path, **SAVING, max_steps=3).train()
    other = make_trainer("sft", tmp_path, **SAVING, max_steps=2, seed=7, save_total_limit=1)
    other.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",  # of the new run
        "checkpoint-3",  # of the old one: not deleted
    ]
    resumed = make_trainer("sft", tmp_path, **SAVING, max_steps=2, seed=7)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"learning_rate: was 0.1 and is 0.5"),
        ({"rows": 25}, r"data: hash was .*rows was 24 and is 25"),
        ({"per_device_train_batch_size": 4}, r"rows_per_step: was 8 and is 4"),
        ({"beta": 0.2}, r"beta: was 0.04 and is 0.2"),
        ({"reward": lambda completions, **_: [0.0] * len(completions)}, r"rewards: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_other_settings_is_refused_with_the_difference(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_trainer("grpo", tmp_path, **SAVING, max_steps=1).train()
    with pytest.raises(ConfigError, match=message):
        make_trainer("grpo", tmp_path, **SAVING, **{"max_steps": 2, **changes}).train(resume_from_checkpoint=True)


def test_a_learning_rate_that_may_change_has_an_effect(tmp_path: Path) -> None:
    options = {**SAVING, "lr_scheduler_type": "linear", "max_steps": 4}
    make_trainer("sft", tmp_path, **options, learning_rate=0.4).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-3")
    resumed = make_trainer("sft", tmp_path, **options, learning_rate=0.8, allow_resume_changes=["learning_rate"])
    resumed.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.4, 0.3, 0.4, 0.2])


def test_fewer_gradient_accumulation_steps_of_more_rows_are_the_same_settings(tmp_path: Path) -> None:
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    make_trainer("grpo", tmp_path, **SAVING, max_steps=1, **cut).train()
    cut = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    resumed = make_trainer("grpo", tmp_path, **SAVING, max_steps=2, **cut)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_a_checkpoint_that_cannot_be_written_is_removed_and_the_last_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("sft", tmp_path, **SAVING, max_steps=2)
    save = trainer._save_rng_state

    def full(folder: str) -> None:
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
        save(folder)

    monkeypatch.setattr(trainer, "_save_rng_state", full)
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*No space left.*The last complete one is .*checkpoint-1"):
        trainer.train()
    assert not (tmp_path / ".saving").exists()


def test_a_checkpoint_in_the_background_is_whole_when_training_ends(tmp_path: Path) -> None:
    make_trainer("grpo", tmp_path, **SAVING, max_steps=3, save_in_background=True, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert problem_of(tmp_path / "checkpoint-3") is None


@pytest.mark.parametrize("folder", ["a-file", "/proc/prefrl"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_is_loaded(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.setattr("prefrl.trainer.base_trainer.load_model", None)
    with pytest.raises(ConfigError, match=r"output_dir=.*cannot be written to: .* Choose another folder"):
        make_trainer("sft", tmp_path / folder)


@pytest.mark.parametrize(("optim", "times"), [("sgd", 4), ("adamw_torch", 12)])
def test_a_disk_without_room_for_a_checkpoint_is_an_error_before_the_first_step(
    optim: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("sft", tmp_path, **SAVING, max_steps=1, optim=optim)
    needed = times * sum(p.numel() for p in trainer.model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(ConfigError, match=r"MB free, and a checkpoint needs .* MB"):
        trainer.train()
    assert trainer.state.global_step == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    trainer.train()


# Signals and the deadline.


class Signals(TrainerCallback):
    """Sends this process a signal at the start of a step, counted from 0."""

    def __init__(self, number: int, step: int = 1) -> None:
        self.number = number
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@contextmanager
def usual_handler(number: int, handler: Any) -> Iterator[None]:
    """Shells start jobs in the background with SIGINT ignored, and then it stays so."""
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, 130)]
)
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(
    number: int, error: type[BaseException], code: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("sft", tmp_path, max_steps=4)
    trainer.add_callback(Signals(number))
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    with usual_handler(number, handler), pytest.raises(error) as caught:
        trainer.train()
    assert getattr(caught.value, "code", None) == code
    assert "stopped after step 2 of 4. To continue, start the same training with resume_from_checkpoint=True" in (
        capsys.readouterr().err
    )
    found = find_last(tmp_path, run=None)
    assert found.folder is not None
    assert found.folder.name == "checkpoint-2"


def test_a_deadline_ends_the_process_with_a_code_for_schedulers(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        make_trainer("sft", tmp_path, max_steps=4, max_train_time=1e-6).train()
    assert caught.value.code == 75
    assert (tmp_path / "checkpoint-1").is_dir()


def test_a_signal_ends_a_generation_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = make_trainer("grpo", tmp_path, max_steps=4)
    generate = trainer.generator.generate

    def slow(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the signal was not noticed")
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer.generator, "generate", slow)
    with pytest.raises(SystemExit):
        trainer.train()
    assert problem_of(tmp_path / "checkpoint-2") is None


class SignalsAt(TrainerCallback):
    """Sends this process a signal in step 2: while a reward runs, a checkpoint is saved or an evaluation ends."""

    def __init__(self, place: str) -> None:
        self.place = place

    def at(self, place: str, state: Any) -> None:
        if place == self.place and state.global_step == (1 if place == "reward" else 2):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.at("save", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        self.at("evaluation", state)

    def reward(self, completions: list[str], trainer_state: Any) -> list[float]:
        """Signals in the middle of it."""
        self.at("reward", trainer_state)
        return ragged_reward(completions)


def test_a_run_that_was_stopped_anywhere_goes_on_exactly(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": dataset_of("grpo", 2)}
    ends = {}
    for place in ("nowhere", "reward", "save", "evaluation"):
        signals = SignalsAt(place)
        make = partial(make_trainer, "grpo", tmp_path / place, **options, reward=signals.reward, callbacks=[signals])
        trainer = make()
        if place != "nowhere":
            with usual_handler(signal.SIGTERM, signal.SIG_DFL), pytest.raises(SystemExit):
                trainer.train()
            signals.place = "nowhere"
            trainer = make()
        trainer.train(resume_from_checkpoint=True)
        ends[place] = torch.cat([weight.flatten() for weight in weights_of(trainer.model).values()])
    for place, end in ends.items():
        assert torch.equal(end, ends["nowhere"]), place


def test_a_trainer_that_was_interrupted_twice_goes_on_in_the_same_process(tmp_path: Path) -> None:
    whole = make_trainer("sft", tmp_path / "whole", max_steps=4)
    whole.train()
    trainer = make_trainer("sft", tmp_path / "run", max_steps=4)
    for step in (1, 2):
        trainer.add_callback(signals := Signals(signal.SIGINT, step))
        with usual_handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=True)
        trainer.remove_callback(signals)
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer, whole)


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_an_error_of_a_reward_loses_no_step(save_strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": save_strategy, "save_steps": 100, "max_steps": 4}
    asked: list[int] = []

    def failing(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        assert trainer_state.global_step < 2
        return ragged_reward(completions, **columns)

    def mended(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        asked.append(trainer_state.global_step)
        return ragged_reward(completions, **columns)

    with pytest.raises(RewardError, match="failing"):
        make_trainer("grpo", tmp_path / "run", **options, reward=failing).train()
    if save_strategy == "no":
        assert find_last(tmp_path / "run", run=None).folder is None
        return
    resumed = make_trainer("grpo", tmp_path / "run", **options, reward=mended, allow_resume_changes=["rewards"])
    resumed.train(resume_from_checkpoint=True)
    assert asked == [2, 3]
    whole = make_trainer("grpo", tmp_path / "whole", **options)
    whole.train()
    assert_same_weights(resumed, whole)


# The journal.


def test_the_journal_is_bounded_and_keeps_what_a_resumed_run_needs(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "journal_keep": 1, "max_steps": 5}
    make_trainer("grpo", tmp_path, **options).train()
    files = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert files == ["completions_00003.parquet", "completions_00004.parquet"]
    assert set(pq.read_table(tmp_path / "completions" / files[0])["step"].to_pylist()) == {3}


def test_without_a_journal_nothing_is_written(tmp_path: Path) -> None:
    make_trainer("grpo", tmp_path, max_steps=1, journal_keep=0).train()
    assert not (tmp_path / "completions").exists()


def test_changed_settings_forget_what_was_sampled_after_the_checkpoint(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    make_trainer("grpo", tmp_path, **options).train()
    shutil.rmtree(tmp_path / "checkpoint-3")
    asked: list[int] = []

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        asked.append(trainer_state.global_step)
        return [float(len(text)) for text in completions]

    resumed = make_trainer("grpo", tmp_path, **options, reward=reward, allow_resume_changes=["rewards"])
    resumed.train(resume_from_checkpoint=True)
    assert asked == [2]


def test_the_curriculum_learns_from_the_journal_what_it_had_learned(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "curriculum": "variance"}
    whole: Any = make_trainer("grpo", tmp_path, **options)
    whole.train()
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "completions" / "completions_00005.parquet").unlink()
    resumed: Any = make_trainer("grpo", tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    expected = whole.prompts.curriculum.state_dict()
    assert expected["counts"].sum() == 12
    assert all(torch.equal(value, expected[name]) for name, value in resumed.prompts.curriculum.state_dict().items())
