"""Checkpoints at another place, without a trainer."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from prefrl.errors import CheckpointError, ConfigError
from prefrl.run.checkpoints import (
    MANIFEST,
    find_last,
    manifest_of,
    problem_of,
    publish,
    rotate,
    staging_folder,
    text_of,
)
from prefrl.run.uploads import Place, Uploads, check_place, fetch
from tests.contract.survival_worker import forked
from tests.patience import PATIENCE

NAMES = ["a/deep/weights", "b", "c"]
NO_PAUSE = (0.0,)


def save(folder: Path, step: int, *, run: str = "r", resumable: bool = True, text: str = "weights") -> Path:
    staged = staging_folder(folder) / f"checkpoint-{step}"
    for name in NAMES:
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text(f"{text} {name} {step}")
    return publish(folder, run=run, step=step, resumable=resumable)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def memory() -> Any:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


class Breaks:
    """A file system that raises instead of writing the n-th file, and notes what it was given."""

    def __init__(self, files: Any, number: int) -> None:
        self.files = files
        self.number = number
        self.put: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def put_file(self, source: str, target: str) -> None:
        self.number -= 1
        if self.number == 0:
            self.files.pipe_file(target, b"we")  # what was written until then
            raise ConnectionError("no route to https://me:secret@host")
        self.put.append(target)
        self.files.put_file(source, target)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_was_uploaded_comes_back(kind: str, tmp_path: Path, memory: Any) -> None:
    url = "memory://bucket/run" if kind == "memory" else str(tmp_path / "mounted" / "run")
    checkpoint = save(tmp_path / "run", 3)
    Place(url).upload(checkpoint, checkpoint.name)
    other = tmp_path / "other"
    other.mkdir()
    found = fetch("resume_from_checkpoint", f"{url}/checkpoint-3", other)
    assert found == other / "checkpoint-3"
    assert contents(found) == contents(checkpoint)
    assert not (other / ".saving").exists()


def test_an_upload_that_breaks_off_is_not_whole_and_goes_on_where_it_was(tmp_path: Path, memory: Any) -> None:
    place = Place("memory://run")
    checkpoint = save(tmp_path, 3)
    place._files = breaking = Breaks(memory, 2)
    with pytest.raises(ConnectionError):
        place.upload(checkpoint, checkpoint.name)
    assert place.manifest("checkpoint-3") is None
    assert fetch("upload_to", "memory://run", tmp_path / "other") is None
    place.upload(checkpoint, checkpoint.name)
    assert [path.removeprefix("/run/checkpoint-3/") for path in breaking.put] == NAMES  # each once
    place._files = Breaks(memory, 1)
    place.upload(checkpoint, checkpoint.name)  # there is nothing left to do
    assert contents(place.fetch("checkpoint-3", tmp_path / "new")) == contents(checkpoint)


class Buckets(MemoryFileSystem):
    """As s3fs and gcsfs show a store: whoever makes a folder makes its bucket, too."""

    protocol = "buckets"
    buckets: ClassVar = {"mine"}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("buckets://").strip("/")

    def exists(self, path: str, **options: Any) -> bool:
        return path in self.buckets or super().exists(path, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.buckets.add(path.partition("/")[0])

    def put_file(self, source: str, target: str, **_: Any) -> None:
        self.pipe_file(target, Path(source).read_bytes())

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if path.partition("/")[0] not in self.buckets:
            raise FileNotFoundError("no such bucket")
        super().pipe_file(path, value, **options)


def test_a_bucket_that_is_not_there_is_not_made(tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    fsspec.register_implementation("buckets", Buckets, clobber=True)
    checkpoint = save(tmp_path / "run", 3)
    failed = {}
    for bucket in ("mine", "mien"):
        uploads = Uploads(tmp_path / "run", Place(f"buckets://{bucket}/run"), pauses=NO_PAUSE)
        uploads.add(checkpoint)
        failed[bucket] = uploads.finish(PATIENCE)
    assert failed == {"mine": {}, "mien": {"checkpoint-3": "FileNotFoundError: no such bucket"}}
    assert Buckets.buckets == {"mine"}
    assert "checkpoint-3 could not be uploaded to buckets://mien/run: FileNotFoundError: no such bucket" in caplog.text


def test_a_checkpoint_made_again_replaces_the_uploaded_one_of_the_same_size(tmp_path: Path, memory: Any) -> None:
    place = Place("memory://run")
    place.upload(save(tmp_path / "first", 3), "checkpoint-3")
    again = save(tmp_path / "again", 3, text="WEIGHTS")
    place._files = Breaks(memory, 2)
    with pytest.raises(ConnectionError):
        place.upload(again, "checkpoint-3")
    assert place.manifest("checkpoint-3") is None  # the first one's seal does not cover a mixture
    place.upload(again, "checkpoint-3")
    assert contents(place.fetch("checkpoint-3", tmp_path / "new")) == contents(again)


def test_the_last_whole_checkpoint_of_a_place_is_fetched(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place("memory://run")
    for step in (2, 9, 10):  # by number, not by name
        place.upload(save(tmp_path, step), f"checkpoint-{step}")
    place.upload(save(tmp_path, 11, resumable=False), "checkpoint-11")
    memory.pipe_file("/run/checkpoint-10/b", b"WEIGHTS b 10")  # as many bytes
    memory.pipe_file("/run/checkpoint-12/uploading.json", b"{}")
    place.upload(save(tmp_path, 13), "checkpoint-13")
    memory.rm_file("/run/checkpoint-13/b")
    found = fetch("resume_from_checkpoint", "memory://run/", tmp_path / "new")
    assert found == tmp_path / "new" / "checkpoint-9"
    assert "checkpoint-12 is skipped: its upload was not finished" in caplog.text
    assert "checkpoint-11 is skipped: it holds a model without training state" in caplog.text
    assert "checkpoint-10: b is damaged" in caplog.text
    assert "checkpoint-13: b is missing" in caplog.text
    with pytest.raises(ConfigError, match=r"checkpoint-10: b is damaged.* Name another checkpoint"):
        fetch("resume_from_checkpoint", "memory://run/checkpoint-10", tmp_path / "new")
    assert not (tmp_path / "new" / ".saving").exists()


def test_checkpoints_of_an_earlier_run_at_the_same_place_are_skipped(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place("memory://run")
    for step in (1, 2, 8):
        place.upload(save(tmp_path / "old", step, run="old"), f"checkpoint-{step}")
    place.upload(save(tmp_path / "new", 1, run="new"), "checkpoint-1")
    found = fetch("upload_to", "memory://run", tmp_path / "other")
    assert found is not None
    assert contents(found) == contents(tmp_path / "new" / "checkpoint-1")
    assert "checkpoint-8 is skipped: it belongs to another run" in caplog.text
    named = fetch("resume_from_checkpoint", "memory://run/checkpoint-8", tmp_path / "other")
    assert named is not None


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_a_seal_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path, memory: Any) -> None:
    place = Place("memory://run")
    checkpoint = save(tmp_path / "run", 1)
    place.upload(checkpoint, "checkpoint-1")
    memory.pipe_file("/run/outside", b"weights c 1")
    manifest = manifest_of(checkpoint)
    assert manifest is not None
    elsewhere = replace(manifest, files={name: manifest.files["c"]})
    memory.pipe_file(f"/run/checkpoint-1/{MANIFEST}", text_of(elsewhere).encode())
    with pytest.raises(CheckpointError, match="outside of the folder"):
        place.fetch("checkpoint-1", tmp_path / "new")
    assert not list((tmp_path / "new").rglob("outside"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://run", r"upload_to='nothing://run': .*nothing.* whose package"),
        ("hf://me/model", r"push_to_hub=True"),
        ("", r"upload_to='': must be a folder or a URL"),
        (3, r"upload_to=3: must be a folder or a URL"),
    ],
)
def test_a_place_that_fsspec_does_not_know_is_refused(url: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_place("upload_to", url)


def test_uploads_are_tried_again_and_what_fails_is_told(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place("memory://run")
    place._files = Breaks(memory, 2)
    uploads = Uploads(tmp_path, place, pauses=NO_PAUSE)
    uploads.add(save(tmp_path, 1))
    assert uploads.finish(PATIENCE) == {}
    assert place.manifest("checkpoint-1") is not None
    assert "ConnectionError: no route to https://***@host; next try in 0 seconds" in caplog.text

    class Down(Breaks):
        def cat_file(self, path: str) -> bytes:
            raise TimeoutError("is down")

    place._files = Down(memory, 0)
    uploads.add(save(tmp_path, 2))
    assert uploads.finish(PATIENCE) == {"checkpoint-2": "TimeoutError: is down"}
    place._files = memory
    assert uploads.finish(PATIENCE) == {}  # once more at the end
    assert place.names() == ["checkpoint-2", "checkpoint-1"]


def test_what_failed_is_uploaded_with_the_next_checkpoint(tmp_path: Path, memory: Any) -> None:
    place = Place("memory://run")
    tries = len(NO_PAUSE) + 1
    uploads = Uploads(tmp_path, place, pauses=NO_PAUSE)
    ended = threading.Event()

    class DownAtFirst(Breaks):
        def exists(self, path: str) -> bool:
            self.number -= 1
            if self.number < tries:
                return bool(self.files.exists(path))
            raise TimeoutError("is down")

    place._files = DownAtFirst(memory, 2 * tries)
    work = uploads._work
    uploads._work = lambda: (work(), ended.set())  # type: ignore[method-assign, assignment]
    uploads.add(save(tmp_path, 1))
    assert ended.wait(PATIENCE)
    assert place.manifest("checkpoint-1") is None
    ended.clear()
    uploads.add(save(tmp_path, 2))
    assert ended.wait(PATIENCE)
    assert [place.manifest(f"checkpoint-{step}") is not None for step in (1, 2)] == [True, True]
    assert not list((tmp_path / ".uploading").iterdir())


class Waits(Breaks):
    """Waits in the middle of an upload."""

    def __init__(self, files: Any) -> None:
        super().__init__(files, 0)
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def put_file(self, source: str, target: str) -> None:
        self.is_reached.set()
        assert self.may_go_on.wait(PATIENCE)
        super().put_file(source, target)


def test_a_checkpoint_may_be_deleted_while_it_is_uploaded_and_waiting_ones_are_told(
    tmp_path: Path, memory: Any
) -> None:
    place = Place("memory://run")
    place._files = waits = Waits(memory)
    uploads = Uploads(tmp_path, place, pauses=NO_PAUSE)
    first = save(tmp_path, 1)
    saved = contents(first)
    uploads.add(first)
    assert waits.is_reached.wait(PATIENCE)
    for step in (2, 3):
        uploads.add(save(tmp_path, step))
        rotate(tmp_path, run="r", limit=1, best=None)
    assert not first.exists()
    assert uploads.finish(0.0).keys() == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}  # it does not wait longer
    waits.may_go_on.set()
    assert uploads.finish(PATIENCE) == {"checkpoint-2": "it was deleted before its turn (save_total_limit)"}
    assert contents(place.fetch("checkpoint-1", tmp_path / "new")) == saved
    assert [path.split("/")[2] for path in waits.put] == ["checkpoint-1"] * 3 + ["checkpoint-3"] * 3


def test_a_process_that_is_killed_in_an_upload_leaves_it_to_the_next(tmp_path: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mounted")
    saved = contents(save(run, 1))

    def die() -> None:
        place = Place(url)

        class Kills(Breaks):
            def put_file(self, source: str, target: str) -> None:
                if target.endswith("/c"):
                    os.kill(os.getpid(), 9)
                super().put_file(source, target)

        place._files = Kills(place._files, 0)
        uploads = Uploads(run, place, pauses=NO_PAUSE)
        uploads.resume("r", everything=True)
        uploads.finish(PATIENCE)

    assert forked(die) == -9
    assert Place(url).manifest("checkpoint-1") is None
    shutil.rmtree(run / "checkpoint-1")  # save_total_limit may have deleted it
    save(run, 2, run="other")
    uploads = Uploads(run, place := Place(url), pauses=NO_PAUSE)
    place._files = counting = Breaks(place._files, 0)
    uploads.resume("r", everything=True)
    assert uploads.finish(PATIENCE) == {}
    assert [Path(path).name for path in counting.put] == ["c"]
    assert place.names() == ["checkpoint-1"]  # not that of the other run
    assert contents(place.fetch("checkpoint-1", tmp_path / "new")) == saved
    assert problem_of(tmp_path / "new" / "checkpoint-1") is None


def test_what_is_left_of_another_runs_uploads_is_deleted(tmp_path: Path, memory: Any) -> None:
    left = tmp_path / ".uploading"
    shutil.copytree(save(tmp_path, 1, run="other"), left / "checkpoint-1")
    (left / "part").mkdir()
    uploads = Uploads(tmp_path, Place("memory://run"), pauses=NO_PAUSE)
    uploads.resume("r", everything=True)
    assert uploads.finish(PATIENCE) == {}
    assert not list(left.iterdir())
    assert not memory.exists("/run")
    assert find_last(tmp_path, run="other").folder is not None
