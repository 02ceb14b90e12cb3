"""Uploads of checkpoints in the background, which training neither waits for nor depends on.

They go to a folder that fsspec reaches: `s3://bucket/run`, `gs://...`, a mounted folder.

<url>/run.txt                           the id of the run that uploaded last
<url>/checkpoint-<step>/                sealed checkpoints, as in a run's folder
<url>/checkpoint-<step>/manifest.json   their seal; it is written last, so whoever finds it finds all files
<url>/checkpoint-<step>/uploading.json  the same seal while the other files are being written
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from prefrl.errors import CheckpointError, ConfigError, reason_of, without_secrets
from prefrl.run.checkpoints import (
    MANIFEST,
    Manifest,
    link_files,
    manifest_of,
    move_in_place,
    own_checkpoints,
    parsed,
    problem_of,
    staging_folder,
    step_of,
)

_log = logging.getLogger(__name__)

_STARTED = "uploading.json"
_RUN = "run.txt"


def is_url(text: object) -> bool:
    """Whether a text names a place of fsspec, and not a local folder."""
    return isinstance(text, str) and "://" in text


def check_place(option: str, url: str) -> None:
    """Check that fsspec knows a place; it is not contacted.

    Raises:
        ConfigError: fsspec does not know it, the package that it needs is missing, or it is on the Hub.
    """
    if not (isinstance(url, str) and url):
        raise ConfigError(f"{option}={url!r}: must be a folder or a URL of fsspec, such as 's3://bucket/run'")
    shown = without_secrets(url)
    if url.startswith("hf://"):
        raise ConfigError(
            f"{option}={shown!r}: a checkpoint on the Hub is one commit. To upload, set push_to_hub=True, "
            "hub_model_id and hub_strategy='all_checkpoints'; to resume, get the folder with `hf download` and pass "
            "its path."
        )
    try:
        fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0] or "file")
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{option}={shown!r}: {error}. Allowed are a folder and the URLs of fsspec, such as 's3://bucket/run', "
            "whose package (s3fs, gcsfs, adlfs, ...) must be installed."
        ) from error


class Place:
    """Where checkpoints are uploaded to and fetched from.

    Args:
        url: A folder, or a URL that fsspec knows; its options come from fsspec's own config and from the environment.
    """

    def __init__(self, url: str) -> None:
        self.url = without_secrets(url)
        self._files: Any
        self._files, path = fsspec.core.url_to_fs(url)
        self._path = str(path).rstrip("/")

    def upload(self, folder: Path, name: str) -> None:
        """Write a sealed checkpoint, which replaces another one of its name. What a killed upload has written is kept.

        Raises:
            Exception: Whatever fsspec raises; calling this once more goes on with the file that failed.
        """
        target, seal = f"{self._path}/{name}", (folder / MANIFEST).read_bytes()
        manifest = parsed(seal)
        if manifest is None:
            raise CheckpointError(f"{folder}: {MANIFEST} is damaged")
        if self._read(f"{target}/{MANIFEST}") == seal:
            return
        if self.run() != manifest.run:
            self._make(self._path)
            self._files.pipe_file(f"{self._path}/{_RUN}", manifest.run.encode())
        if self._read(f"{target}/{_STARTED}") != seal:
            if self._files.exists(target):
                self._files.rm(target, recursive=True)
            self._make(target)
            self._files.pipe_file(f"{target}/{_STARTED}", seal)
        written = self._sizes(target)
        for file, expected in manifest.files.items():
            if written.get(file) != expected.size:
                self._make(f"{target}/{file}".rpartition("/")[0])
                self._files.put_file(str(folder / file), f"{target}/{file}")
        self._files.pipe_file(f"{target}/{MANIFEST}", seal)
        self._files.rm_file(f"{target}/{_STARTED}")

    def run(self) -> str | None:
        """The id of the run that uploaded last; None: there was none."""
        text = self._read(f"{self._path}/{_RUN}")
        return None if text is None else text.decode(errors="replace")

    def names(self) -> list[str]:
        """The names of all that could be checkpoints, the last first."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        steps = {name: step_of(name) for name in (str(path).rstrip("/").rpartition("/")[2] for path in paths)}
        return sorted((name for name in steps if steps[name] is not None), key=lambda n: steps[n] or 0, reverse=True)

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint; None: it is not there, or not whole yet."""
        seal = self._read(f"{self._path}/{name}/{MANIFEST}")
        return None if seal is None else parsed(seal)

    def fetch(self, name: str, run_folder: Path) -> Path:
        """Copy a checkpoint into a run's folder, where it replaces another one of its name; returns its folder.

        Raises:
            CheckpointError: It is not whole.
            Exception: Whatever fsspec raises.
        """
        source = f"{self._path}/{name}"
        seal = self._read(f"{source}/{MANIFEST}")
        manifest = None if seal is None else parsed(seal)
        if seal is None or manifest is None:
            raise CheckpointError(f"{self.url}/{name}: {MANIFEST} is missing or damaged")
        final = run_folder / name
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == seal and problem_of(final) is None:
            return final
        staged = staging_folder(run_folder) / name
        try:
            for file in manifest.files:
                if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                    raise CheckpointError(f"{self.url}/{name}: {MANIFEST} names {file!r}, outside of the folder")
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._files.get_file(f"{source}/{file}", str(staged / file))
                except FileNotFoundError as error:  # deleted by hand, or by an upload that replaces it
                    raise CheckpointError(f"{self.url}/{name}: {file} is missing") from error
            (staged / MANIFEST).write_bytes(seal)
            problem = problem_of(staged)
            if problem is not None:
                raise CheckpointError(f"{self.url}/{name}: {problem}")
        except BaseException:
            shutil.rmtree(staged.parent, ignore_errors=True)
            raise
        return move_in_place(run_folder, staged)

    def _make(self, folder: str) -> None:
        """Make a folder, but no bucket, which may have a wrong name; then writing into it fails."""
        if self._files.exists(folder.partition("/")[0] or "/"):
            self._files.makedirs(folder, exist_ok=True)

    def _read(self, path: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(path))
        except FileNotFoundError:
            return None

    def _sizes(self, folder: str) -> dict[str, int]:
        """Sizes in bytes of the files below a folder, by relative path."""
        self._files.invalidate_cache()
        found = self._files.find(folder, detail=True)
        return {str(path).removeprefix(f"{folder}/"): int(info["size"]) for path, info in found.items()}


def fetch(option: str, url: str, run_folder: Path, *, run: str | None = None) -> Path | None:
    """Copy a checkpoint, and the best one that it names, into a run's folder, where they replace others.

    Args:
        option: Where the URL comes from, for errors.
        url: A checkpoint, or a folder of them: the last whole one that can be resumed from.
        run_folder: The run's folder, to which no other process writes.
        run: The run whose checkpoints count in a folder of them; None: the one that uploaded last.

    Returns:
        Its folder; None: there are no checkpoints.

    Raises:
        ConfigError: The place cannot be read, or the checkpoint is not whole.
    """
    check_place(option, url)
    parent, _, name = url.rstrip("/").rpartition("/")
    try:
        place = Place(parent if step_of(name) is not None else url)
        found = place.fetch(name, run_folder) if step_of(name) is not None else _fetch_last(place, run_folder, run)
        if found is not None:
            _fetch_best(place, found)
        return found
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}. Name another checkpoint, or the folder that holds them.") from error
    except Exception as error:  # a library that talks to a server may raise anything
        raise ConfigError(
            f"{option}={without_secrets(url)!r} cannot be read: {reason_of(error)}. Check the URL, the network and "
            "your login for this place."
        ) from error


def _fetch_last(place: Place, run_folder: Path, run: str | None) -> Path | None:
    run = run or place.run()
    for name in place.names():
        reason = _reason_against(place.manifest(name), run)
        if reason is not None:
            _log.warning("%s/%s is skipped: %s", place.url, name, reason)
            continue
        try:
            return place.fetch(name, run_folder)
        except CheckpointError as error:
            _log.warning("an uploaded checkpoint is skipped: %s", error)
    return None


def _reason_against(manifest: Manifest | None, run: str | None) -> str | None:
    """Why training does not resume from a checkpoint; None: it may."""
    if manifest is None:
        return "its upload was not finished"
    if run not in (None, manifest.run):
        return "it belongs to another run"
    return None if manifest.resumable else "it holds a model without training state"


def _fetch_best(place: Place, checkpoint: Path) -> None:
    """Fetch the best checkpoint so far, whose weights may be loaded at the end of training."""
    state = checkpoint / "trainer_state.json"
    best = json.loads(state.read_text(encoding="utf-8"))["best_model_checkpoint"] if state.is_file() else None
    name = PurePosixPath(best or "").name
    if step_of(name) is None or (checkpoint.parent / name).is_dir():
        return
    if place.manifest(name) is None:
        _log.warning("%s/%s, the best checkpoint so far, is missing; training continues without it", place.url, name)
    else:
        place.fetch(name, checkpoint.parent)


# Seconds before the second try of an upload, the third and so on.
_PAUSES = (1.0, 4.0, 16.0, 60.0)
_GONE = "it was deleted before its turn (save_total_limit)"


class Uploads:
    """Uploads the checkpoints of a run one at a time, the last first. Only the main process uses it.

    The one that is being uploaded has a second name in `.uploading`, so that it may be deleted meanwhile, and so that
    the next process finds it if this one is killed.

    Args:
        run_folder: The run's folder.
        place: Where to.
        pauses: Seconds between the tries of an upload, of which there is one more.
    """

    def __init__(self, run_folder: Path, place: Place, *, pauses: Sequence[float] = _PAUSES) -> None:
        self.place = place
        self._run_folder = run_folder
        self._pauses = pauses
        self._changed = threading.Condition()  # guards what follows
        self._waiting: set[str] = set()  # names of checkpoints
        self._current: str | None = None
        self._failed: dict[str, str] = {}  # name -> reason
        self._is_running = False

    @property
    def _links(self) -> Path:
        return self._run_folder / ".uploading"

    def resume(self, run: str, *, everything: bool) -> None:
        """Upload what an earlier process of the run has not.

        Args:
            run: Id of the run; what is left of another run's uploads is deleted.
            everything: Whether to upload all checkpoints of the run, and not only the one that was under way.
        """
        for left in self._links.iterdir() if self._links.is_dir() else ():
            manifest = manifest_of(left)
            if step_of(left.name) is None or manifest is None or manifest.run != run:
                shutil.rmtree(left, ignore_errors=True)
            else:
                self.add(left)
        if everything:
            self.add(*own_checkpoints(self._run_folder, run=run).values())

    def add(self, *checkpoints: Path) -> None:
        """Upload sealed checkpoints, unless they are at their place already, and once more those that failed."""
        with self._changed:
            again = {name for name in self._failed if (self._run_folder / name).is_dir()}
            self._waiting |= again | {checkpoint.name for checkpoint in checkpoints}
            if self._waiting and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="prefrl-upload", daemon=True).start()

    def finish(self, seconds: float) -> dict[str, str]:
        """Wait for all uploads, but no longer than some seconds; those that failed are tried once more.

        Returns:
            What is not uploaded: the names of checkpoints with the reasons.
        """
        self.add()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_running, timeout=seconds):
                late = {*self._waiting, self._current} - {None}
                return self._failed | {str(name): f"it took longer than {seconds:g} seconds" for name in late}
            return dict(self._failed)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = max(self._waiting, key=lambda name: step_of(name) or 0, default=None)
                if self._current is None:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                name = self._current
                self._waiting.remove(name)
                self._failed.pop(name, None)
            failure = self._failure(name)
            if failure is not None:
                with self._changed:
                    self._failed[name] = failure

    def _failure(self, name: str) -> str | None:
        """Upload a checkpoint; why that was not possible, None if it was."""
        reason = ""
        for pause in (*self._pauses, None):
            try:
                links = self._linked(name)
                if links is None:
                    return reason or _GONE
                self.place.upload(links, name)
            except Exception as error:  # a library that talks to a server may raise anything
                reason = reason_of(error)
                then = "it is tried again with the next one" if pause is None else f"next try in {pause:g} seconds"
                _log.warning("%s could not be uploaded to %s: %s; %s", name, self.place.url, reason, then)
                threading.Event().wait(pause or 0)
            else:
                reason = ""
                break
        # Many that failed would fill the disk; this one can be linked again as long as it is not deleted.
        shutil.rmtree(self._links / name, ignore_errors=True)
        return reason or None

    def _linked(self, name: str) -> Path | None:
        """The checkpoint under its second name; None if it is gone."""
        checkpoint, links = self._run_folder / name, self._links / name
        if not (checkpoint / MANIFEST).is_file():
            return links if problem_of(links) is None else None
        if _is_same(checkpoint, links):
            return links
        part = self._links / "part"
        for old in (part, links):
            shutil.rmtree(old, ignore_errors=True)
        link_files(checkpoint, part)
        os.rename(part, links)
        return links


def _is_same(checkpoint: Path, links: Path) -> bool:
    return (links / MANIFEST).is_file() and (links / MANIFEST).read_bytes() == (checkpoint / MANIFEST).read_bytes()
