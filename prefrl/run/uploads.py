"""Uploads of checkpoints in the background, which training neither waits for nor depends on."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from prefrl.printable import reason_of
from prefrl.run.checkpoints import own_checkpoints, step_of
from prefrl.run.links import link_files
from prefrl.run.place import Place
from prefrl.run.seal import MANIFEST, manifest_of, problem_of

__all__ = ["Uploads"]

_log = logging.getLogger(__name__)

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
        """Wait for all uploads; those that failed are tried once more.

        Args:
            seconds: The longest wait.

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
