"""The folder of a run, without a trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefrl import distributed
from prefrl.errors import CheckpointError, ConfigError
from prefrl.run.checkpoints import (
    MANIFEST,
    clean,
    find_last,
    manifest_of,
    problem_of,
    publish,
    rotate,
    seal,
    staging_folder,
)
from prefrl.run.folder import (
    STARTS,
    Identity,
    Stopped,
    StopRequest,
    command_of,
    leave,
    only_writer,
    read_starts,
    record_start,
    writer_token,
)
from prefrl.trainer.run_folder import RunFolder
from tests.contract.survival_worker import forked


def stage(folder: Path, step: int, *, text: str = "weights") -> None:
    staged = staging_folder(folder) / f"checkpoint-{step}" / "inner"
    staged.mkdir(parents=True)
    (staged / "weights").write_text(text)


def save(folder: Path, step: int, *, run: str = "r", resumable: bool = True) -> Path:
    stage(folder, step)
    return publish(folder, run=run, step=step, resumable=resumable)


def delete(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (delete, "inner/weights is missing"),
        (shorten, "inner/weights has 6 bytes instead of 7"),
        (flip, "inner/weights is damaged: its bytes differ from those that were saved"),
    ],
)
def test_what_is_wrong_with_a_sealed_folder_is_named(harm: Any, message: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    harm(folder / "inner" / "weights")
    assert problem_of(folder) == message
    (folder / MANIFEST).unlink()
    assert problem_of(folder) == f"{MANIFEST} is missing or damaged"


def test_a_bit_that_changes_a_manifest_is_damage_whatever_it_says(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, run="run")
    path = folder / MANIFEST
    data = path.read_bytes()
    for i in range(8 * len(data)):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << i % 8
        path.write_bytes(changed)
        assert manifest_of(folder) is None


@pytest.mark.parametrize(
    "name",
    [
        *("scaler.pt", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model_fsdp_0/x.distcp", "adapter_model.bin", "more/adapter_model.safetensors"),
        *("optimizer.bin", "optimizer_0/x.distcp", "rng_state_1.pth", "inner/pytorch_model.bin"),
    ],
)
def test_a_file_that_was_added_and_would_be_loaded_is_a_problem(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    problem = problem_of(folder, reads_files=False)
    assert problem is not None
    assert name.startswith(problem.partition(" was added later")[0])


@pytest.mark.parametrize("name", ["README.md", "notes.pt", "merged/model.safetensors", ".cache/huggingface/x"])
def test_other_files_may_be_added(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    assert problem_of(folder) is None


def test_the_last_whole_checkpoint_of_the_run_is_found(tmp_path: Path) -> None:
    for step in (2, 10, 9):  # by number, not by name or time
        save(tmp_path, step)
    save(tmp_path, 11, run="other")
    save(tmp_path, 12, resumable=False)
    flip(tmp_path / "checkpoint-10" / "inner" / "weights")
    found = find_last(tmp_path, run="r")
    assert found.folder == tmp_path / "checkpoint-9"
    assert found.foreign == ["checkpoint-11"]
    assert [text.partition(":")[0] for text in found.unusable] == ["checkpoint-12", "checkpoint-10"]
    found = find_last(tmp_path, run=None)
    assert found.folder == tmp_path / "checkpoint-11"


def test_rotation_goes_by_step_and_keeps_the_best_and_those_of_other_runs(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        save(tmp_path, step)
    save(tmp_path, 1, run="other")
    os.utime(tmp_path / "checkpoint-6", (2e9, 2e9))  # the clock was set back since
    rotate(tmp_path, run="r", limit=2, best=str(tmp_path / "checkpoint-3"))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-3", "checkpoint-12"}


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, 1)
    (elsewhere / "mine").write_text("")
    before = sorted(path.name for path in elsewhere.rglob("*"))
    run = tmp_path / "run"
    run.mkdir()
    for name in (".saving", ".deleting"):
        (run / name).symlink_to(elsewhere)
    clean(run)
    (run / "checkpoint-1").symlink_to(elsewhere)
    save(run, 1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"]
    assert not (run / "checkpoint-1").is_symlink()
    assert sorted(path.name for path in elsewhere.rglob("*")) == before


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    def enter() -> None:
        with pytest.raises(ConfigError, match=rf"process {os.getppid()} on host"), only_writer(tmp_path):
            pass
        os._exit(0 if writer_token(tmp_path) else 3)

    with only_writer(tmp_path):
        shutil.copytree(tmp_path, tmp_path / "copy")  # opens and closes the locked file
        assert forked(enter) == 0

    def die() -> None:
        with only_writer(tmp_path):
            os.kill(os.getpid(), 9)

    assert forked(die) == -9
    with only_writer(tmp_path):  # the kernel has released it
        pass


def test_a_process_that_outlives_the_trainer_does_not_keep_its_folder(tmp_path: Path) -> None:
    reads, writes = os.pipe()

    def die() -> None:
        os.close(writes)
        with only_writer(tmp_path):
            if os.fork() == 0:
                os.read(reads, 1)  # until the test is over
                os._exit(0)
            os.kill(os.getpid(), 9)

    assert forked(die) == -9
    with only_writer(tmp_path):
        os.close(writes)
    os.close(reads)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_node_with_a_file_system_of_its_own_seals_what_it_wrote(
    is_shared: bool, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("main" if is_shared else "other")
    path.mkdir()
    # This process is the first of the second node: what the main process does, happens elsewhere.
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    with only_writer(tmp_path / "main") as token:
        monkeypatch.setattr(distributed, "on_main", lambda work: token)
        run = RunFolder(path, limit=None, in_background=in_background, is_first_of_node=True, run="r")
        with run.open():
            stage(path, 1)
            folder = run.publish(path, step=1, resumable=True, best=None)
    assert folder.exists() == (not is_shared)


def test_a_failure_in_the_background_is_raised_by_the_next_wait(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, limit=None, in_background=True, is_first_of_node=True, run="r")
    run.publish(tmp_path, step=1, resumable=True, best=None)  # nothing was staged
    with pytest.raises(CheckpointError, match="checkpoint-1 could not be written"):
        run.wait()
    assert threading.active_count() >= 1
    run.wait()


def test_a_run_that_has_no_checkpoint_yet_starts_at_its_beginning_under_the_same_id(tmp_path: Path) -> None:
    def start(given: bool, value: int) -> Any:
        run = RunFolder(tmp_path, limit=None, in_background=False, is_first_of_node=True)
        return run.start(given, Identity("", {"lr": value}), allowed=[])

    first = start(False, 1)
    again = start(True, 1)
    assert (again.run, again.checkpoint) == (first.run, None)
    assert start(True, 2).run != first.run  # nothing was saved: it is another run


# Models in a folder.


def writer_of(path: Path) -> RunFolder:
    path.mkdir(exist_ok=True)
    return RunFolder(path, limit=None, in_background=False, is_first_of_node=True)


def save_model(writer: RunFolder, folder: Path, text: str, *, overwrite: bool = False) -> None:
    with writer.model_in(folder, Identity("", {}), overwrite=overwrite) as place:
        (place / "model.safetensors").write_text(text)


def test_a_model_of_another_run_is_kept_unless_it_shall_be_replaced(tmp_path: Path) -> None:
    folder, first, other = tmp_path / "model", writer_of(tmp_path / "a"), writer_of(tmp_path / "b")
    save_model(first, folder, "before it is trained")
    first.start(None, Identity("", {}), allowed=[])
    for text in ("1", "2"):
        save_model(first, folder, text)
    again = writer_of(tmp_path / "a")
    again.start(True, Identity("", {}), allowed=[])
    save_model(again, folder, "3")
    with pytest.raises(CheckpointError, match=rf"{folder} holds a model of another run.*overwrite=True") as error:
        save_model(other, folder, "4")
    saved = tmp_path / "b" / f"saved-{other.run}"
    assert str(saved) in str(error.value)
    assert [(place / "model.safetensors").read_text() for place in (folder, saved)] == ["3", "4"]
    (folder / "adapter_config.json").touch()  # with it, from_pretrained would load another model
    save_model(other, folder, "5", overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "run.json"}
    with pytest.raises(CheckpointError, match="of another run"):
        save_model(again, folder, "6")


def test_training_does_not_begin_in_the_folder_of_a_model_that_it_would_replace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = Identity("", {})
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors belongs to a model that was not trained there"):
        writer_of(tmp_path).start(None, now, allowed=[])
    (tmp_path / "adapter_model.safetensors").unlink()
    first = writer_of(tmp_path)
    save_model(first, tmp_path, "before it is trained")
    first.start(None, now, allowed=[])
    save_model(first, tmp_path, "trained")
    writer_of(tmp_path).start(True, now, allowed=[])
    assert "the model of an earlier run" not in caplog.text
    second = writer_of(tmp_path)
    second.start(None, now, allowed=[])
    assert "holds the model of an earlier run, model.safetensors" in caplog.text
    save_model(second, tmp_path, "another run's")


def test_seals_do_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    seal(tmp_path, run="r", step=0, resumable=True)
    assert problem_of(tmp_path) is None


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/python3", "train.py", "--out", "a b"], "python3 train.py --out 'a b'"),
        (["/v/python", "/v/bin/prefrl", "sft", "--config", "run.yaml"], "prefrl sft --config run.yaml"),
        (["python", "t.py", "--hub-token", "abc", "--password=x"], "python t.py --hub-token '***' '--password=***'"),
        (["python", "t.py", "hf_0123456789abcdefghij"], "python t.py '***'"),
        (["python", "t.py", "--pad_token", "<pad>"], "python t.py --pad_token '<pad>'"),
        ([], ""),
    ],
)
def test_a_command_can_be_given_again_and_has_no_secrets(argv: list[str], command: str) -> None:
    assert command_of(argv) == command


def test_each_start_of_the_run_is_kept_in_order(tmp_path: Path) -> None:
    for run in ("a", "b", "a"):
        record_start(tmp_path, run)
    with (tmp_path / STARTS).open("a", encoding="utf-8") as file:
        file.write('{"run": "a", "ti')
    starts = read_starts(tmp_path, "a")
    assert [start.run for start in starts] == ["a", "a"]
    assert starts[0].time <= starts[1].time
    assert {"python", "prefrl", "torch"} <= starts[0].versions.keys()


def test_without_a_record_there_are_no_starts(tmp_path: Path) -> None:
    assert read_starts(tmp_path, "a") == []


def test_a_training_records_its_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None, in_background=False, is_first_of_node=True)
    for resume in (None, True):  # there is no checkpoint: both begin at step 0
        start = folder.start(resume, Identity("", {"seed": 1}), allowed=[])
    assert [start.run for start in read_starts(tmp_path, start.run)] == [start.run] * 2


@pytest.fixture(autouse=True)
def _usual_handlers() -> Iterator[None]:
    """Of a process that nobody has told what to do at a signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_noted_and_the_second_has_its_usual_effect() -> None:
    request = StopRequest(None)
    with request.listen():
        signal.raise_signal(signal.SIGINT)
        assert request.code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    child = os.fork()
    if child == 0:
        with StopRequest(None).listen():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_wait_that_changes_nothing_is_left_at_once_also_when_the_signal_came_before_it() -> None:
    request = StopRequest(None)
    with request.listen():
        with pytest.raises(Stopped), request.interruptible():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), request.interruptible():
            pass
    with request.listen():  # of the next training
        assert request.code == 0


def test_a_handler_of_the_user_is_left_alone() -> None:
    noted = []
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    request = StopRequest(None)
    with request.listen():
        signal.raise_signal(signal.SIGTERM)
    assert (noted, request.code) == ([signal.SIGTERM], 0)


def test_the_deadline_counts_from_the_start_of_the_training() -> None:
    now = 0.0
    request = StopRequest(10.0, clock=lambda: now)
    now = 100.0
    with request.listen():
        now = 109.0
        assert request.code == 0
        now = 110.0
        assert request.code == 75


@pytest.mark.parametrize(
    ("code", "more", "expected"),
    [
        (130, "", (130, "")),
        (143, "", (143, "")),
        (130, "sys.ps1 = '>>> '", (-signal.SIGINT, "KeyboardInterrupt: 130")),
    ],
)
def test_a_script_ends_with_a_code_and_no_traceback_unless_somebody_types(
    code: int, more: str, expected: tuple[int, str]
) -> None:
    text = f"import sys\n{more}\nfrom prefrl.run.folder import leave\nleave({code})"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip().rpartition("\n")[2]) == expected


def test_the_end_after_ctrl_c_is_a_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt, match="130"):
        leave(128 + signal.SIGINT)
