"""The checkpoints of a training run: written whole or not at all, and read only if they are whole and of this run."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from prefrl import distributed
from prefrl.data.samplers import deal
from prefrl.errors import CheckpointError, ConfigError, without_secrets
from prefrl.run.checkpoints import (
    WORDS_TO_RESUME,
    FileSeal,
    FoundCheckpoint,
    check_whole,
    checkpoint_name,
    clean,
    find_last,
    publish,
    rotate,
    seals_of,
    sizes_in,
    staging_folder,
)
from prefrl.run.folder import (
    STARTS,
    Identity,
    check_same_run,
    new_run_id,
    only_writer,
    read_identity,
    record_start,
    weights_in,
    write_identity,
    writer_token,
)
from prefrl.run.uploads import fetch, is_url

if TYPE_CHECKING:
    from prefrl.trainer.base_config import BaseConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingPoint:
    """Where a training starts."""

    run: str  # id of the run
    checkpoint: Path | None  # None: at step 0
    changed: tuple[str, ...] = ()  # what decides the updates, differs from the checkpoint, and was allowed to
    sizes: Mapping[str, int] = field(default_factory=dict)  # those that the run has found


@dataclass
class RunFolder:
    """The folder of a run. All processes must call its methods; one of them reads and writes.

    HuggingFace's trainer writes a checkpoint into `staging`. `publish` waits until its files are on the disk, seals
    them and moves the checkpoint to its place.

    Args:
        path: `output_dir`.
        limit: `save_total_limit`.
        in_background: Whether training goes on while the files get to the disk.
        is_first_of_node: Whether this process is the first on its node.
        upload_to: URL of a second place for checkpoints; None: there is none.
    """

    path: Path
    limit: int | None
    in_background: bool
    is_first_of_node: bool
    upload_to: str | None = None
    on_sealed: Callable[[Path], object] | None = None  # hears of each checkpoint, before older ones are deleted
    run: str = field(default_factory=new_run_id)  # id of the run that is under way, or none yet
    last_saved: int = -1  # step of the last checkpoint of this training
    _is_staging: bool = False  # whether HuggingFace is writing a checkpoint
    _runs: set[str] = field(default_factory=set)  # ids of the earlier ones of this trainer
    _is_apart: bool = False
    _shares_folder: bool = False  # several ranks write to it, and all of them see the same files
    _thread: threading.Thread | None = None
    _error: list[Exception] = field(default_factory=list)

    @classmethod
    def of(cls, args: BaseConfig, *, is_first_of_node: bool) -> RunFolder:
        """The folder that the options ask for."""
        return cls(
            Path(args.output_dir),
            limit=args.save_total_limit,
            in_background=args.save_in_background,
            is_first_of_node=is_first_of_node,
            upload_to=args.upload_to,
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context of a training: no other run writes to the folder.

        Raises:
            ConfigError: Another process trains in it, or it cannot be written to.
        """
        with ExitStack() as stack:
            token = distributed.on_main(partial(self._enter, stack))
            # The first process of a node whose file system is its own has to seal what its node writes.
            is_other = self.is_first_of_node and not distributed.is_main()
            self._is_apart = is_other and writer_token(self.path) != token
            if self._is_apart:
                clean(self.path)
            self._shares_folder = distributed.world_size() > 1 and not any(distributed.gather_objects(self._is_apart))
            if self.upload_to is not None and distributed.world_size() > 1 and not self._shares_folder:
                raise ConfigError(
                    f"upload_to={without_secrets(self.upload_to)!r}: each node writes its part of a checkpoint to its "
                    "own disk, and one process uploads. Put output_dir on a file system that all nodes share, or "
                    "leave upload_to out."
                )
            yield
            self.wait()

    def _enter(self, stack: ExitStack) -> str:
        token = stack.enter_context(only_writer(self.path))
        clean(self.path)
        return token

    # Reading.

    def start(
        self, given: str | bool | os.PathLike[str] | None, now: Identity, *, allowed: list[str]
    ) -> StartingPoint:
        """Find the checkpoint that a training resumes from, and set the id of the run.

        Args:
            given: `resume_from_checkpoint`: a folder or a URL, see `fetch`; True or "auto" for the last whole
                checkpoint of the run that the folder belongs to, else of `upload_to`, or step 0 if there is none; None
                or "disable" for a new run.
            now: What decides the updates of this training.
            allowed: What may differ from the checkpoint.

        Raises:
            ConfigError: The folder that was given is no whole checkpoint, or it belongs to a run whose updates are
                decided by something else: lists the differences. Or no run has begun in `output_dir` yet, and it
                holds a model.
        """
        given = WORDS_TO_RESUME.get(given.lower(), given) if isinstance(given, str) else given
        self._runs.add(self.run)
        found = distributed.on_main(partial(self._start, given, now, allowed))
        self.run = found.run
        return found

    def _start(self, given: str | bool | os.PathLike[str] | None, now: Identity, allowed: list[str]) -> StartingPoint:
        checkpoint = self._checkpoint(given)
        saved = read_identity(self.path if checkpoint is None else checkpoint) if given else None
        now, changed = replace(now, run=new_run_id()), []
        if saved is not None and (checkpoint is not None or saved.decisive == now.decisive):
            where = str(self.path if checkpoint is None else checkpoint)
            changed = check_same_run(saved, now, where=where, allowed=allowed)
            now = replace(now, run=saved.run, sizes=saved.sizes)
        if not given:
            self._tell_of_others()
        self._check_model(now.run)
        write_identity(self.path, now)
        record_start(self.path, now.run)
        return StartingPoint(now.run, checkpoint, tuple(changed), now.sizes)

    def _checkpoint(self, given: str | bool | os.PathLike[str] | None) -> Path | None:
        if not given:
            return None
        if given is not True:
            folder = self._fetched(str(given)) if is_url(given) else Path(given)
            check_whole(folder)
            return folder
        own = read_identity(self.path)
        found = find_last(self.path, run=None if own is None else own.run)
        if found.folder is None and self.upload_to is not None:
            uploaded = fetch("upload_to", self.upload_to, self.path, run=None if own is None else own.run)
            if uploaded is not None:
                return uploaded
        if found.folder is None and found.unusable:
            raise ConfigError(
                f"resume_from_checkpoint=True: {self.path} has no checkpoint to resume from: "
                f"{'; '.join(found.unusable)}. Start a new training, resume_from_checkpoint=None; to begin with the "
                f"weights of a checkpoint, pass its folder as model={str(self.path / 'checkpoint-...')!r}."
            )
        for reason in [*found.unusable, *(f"{name}: it belongs to another run" for name in found.foreign)]:
            _log.warning("resume_from_checkpoint=True skips %s", reason)
        if found.folder is None:
            _log.warning("resume_from_checkpoint=True: %s has no checkpoint yet; training starts at step 0", self.path)
        return found.folder

    def _fetched(self, url: str) -> Path:
        found = fetch("resume_from_checkpoint", url, self.path)
        if found is None:
            raise ConfigError(
                f"resume_from_checkpoint={without_secrets(url)!r}: there is no checkpoint to resume from. Pass the "
                "folder of upload_to, or a checkpoint in it."
            )
        return found

    def _tell_of_others(self) -> None:
        found: FoundCheckpoint = find_last(self.path, run=None)
        if found.folder is not None:
            _log.warning(
                "%s holds checkpoints of an earlier run, the last of them %s. This is a new run: it replaces "
                "checkpoints of the same steps and does not touch the others. Set resume_from_checkpoint=True to "
                "continue the earlier one.",
                self.path,
                found.folder.name,
            )

    def _check_model(self, run: str) -> None:
        """Warn of a model of another run in `output_dir`; refuse to train there if it is no folder of runs."""
        weights = self._weights_of_others(self.path, run)
        if weights and not (self.path / STARTS).exists():
            raise ConfigError(
                f"output_dir={str(self.path)!r}: {weights[0].name} belongs to a model that was not trained there, and "
                "training would replace it. Choose another folder, or move the model."
            )
        if weights:
            _log.warning(
                "%s holds the model of an earlier run, %s. This is a new run: save_model() replaces that model. To "
                "keep it, move it, or choose another output_dir.",
                self.path,
                weights[0].name,
            )

    # Writing.

    @contextmanager
    def model_in(self, folder: Path, now: Identity, *, overwrite: bool) -> Iterator[Path]:
        """Context in which the main process writes a model to the folder that is returned.

        It waits for nobody: without a partitioned model, scripts may save on the main process only.

        Args:
            folder: Where it was asked to be.
            now: What decides the updates of this training.
            overwrite: Whether a model of another run in the folder is deleted.

        Raises:
            CheckpointError: At the end, if the folder holds a model of another run, so that it was written elsewhere.
        """
        if not distributed.is_main():
            yield folder
            return
        place = self._place_of_model(folder, overwrite=overwrite)
        place.mkdir(parents=True, exist_ok=True)
        write_identity(place, replace(now, run=self.run))  # first: a kill leaves no model without its run
        yield place
        if place != folder:
            raise CheckpointError(
                f"save_model: {folder} holds a model of another run, which is kept. The model of this run is saved in "
                f"{place}. To replace the other one, call save_model({str(folder)!r}, overwrite=True)."
            )

    def _place_of_model(self, folder: Path, *, overwrite: bool) -> Path:
        weights = self._weights_of_others(folder, self.run)
        if weights and not overwrite:
            return self.path / f"saved-{self.run}"
        for path in weights:
            path.unlink()
        return folder

    def _weights_of_others(self, folder: Path, run: str) -> list[Path]:
        """The files of a model in a folder that neither a run nor an earlier one of this trainer has written."""
        owner = read_identity(folder)
        return [] if owner is not None and owner.run in {run, *self._runs} else weights_in(folder)

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Context in which HuggingFace writes a checkpoint, to another place than where it will be."""
        self._is_staging = True
        try:
            yield
        finally:
            self._is_staging = False

    def place_of_checkpoints(self, run_folder: Path) -> Path:
        """The folder in which HuggingFace writes a checkpoint, or looks for some."""
        return staging_folder(run_folder) if self._is_staging else run_folder

    def publish(self, run_folder: Path, *, step: int, resumable: bool, best: str | None) -> Path:
        """Seal the checkpoint that all processes have written to `staging`, and delete old ones.

        Args:
            run_folder: The folder of checkpoints; in a search of hyperparameters, that of the trial.
            step: Optimizer steps that were done.
            resumable: Whether it holds the state of training besides the model.
            best: Path of the best checkpoint, which is not deleted.

        Returns:
            Its folder, which may not be there yet with `in_background`.

        Raises:
            CheckpointError: It cannot be written. The checkpoints that were there are untouched.
        """
        work = partial(self._publish, run_folder, step=step, resumable=resumable, best=best)
        distributed.wait_for_all()
        if not self.in_background:
            known = self._seals(run_folder, step) if self._shares_folder else {}
            distributed.on_main(partial(work, known=known))
            if self._is_apart:
                work()
        elif distributed.is_main() or self._is_apart:
            self._thread = threading.Thread(target=self._guarded, args=(work,), name="prefrl-checkpoint")
            self._thread.start()
        return run_folder / checkpoint_name(step)

    def _seals(self, run_folder: Path, step: int) -> dict[str, FileSeal]:
        """The seals of the files, of which each rank reads a part, on the main process. All processes must call it.

        Raises:
            CheckpointError: A file cannot be written to the disk.
        """
        folder = staging_folder(run_folder) / checkpoint_name(step)
        sizes = distributed.on_main(lambda: sizes_in(folder))
        names, parts = list(sizes), deal(list(sizes.values()), distributed.world_size(), equal_counts=False)
        found: dict[str, FileSeal] = {}
        problem: str | None = None
        try:
            if distributed.place_in_team() == 0:
                found = seals_of(folder, [names[i] for i in parts[distributed.rank()]])
        except FileNotFoundError:
            pass  # this node does not see a new file yet, so the main process reads it
        except OSError as error:
            problem = str(error)
        of_ranks = distributed.gather_objects((found, problem))
        problems = [problem for _, problem in of_ranks if problem is not None]
        if problems:
            raise distributed.on_main(lambda: self.failure(OSError(problems[0]), run_folder, step))
        return {name: value for found, _ in of_ranks for name, value in found.items()}

    def _publish(
        self,
        run_folder: Path,
        *,
        step: int,
        resumable: bool,
        best: str | None,
        known: Mapping[str, FileSeal] = MappingProxyType({}),
    ) -> None:
        try:
            final = publish(run_folder, run=self.run, step=step, resumable=resumable, known=known)
            if self.on_sealed is not None and run_folder == self.path:
                self.on_sealed(final)
            rotate(run_folder, run=self.run, limit=self.limit, best=best)
        except OSError as error:
            raise self.failure(error, run_folder, step) from error

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # `wait` raises it
            self._error.append(error)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._is_apart:
            self._join()
        distributed.on_main(self._join)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error.pop()

    @staticmethod
    def failure(error: Exception, run_folder: Path, step: int) -> CheckpointError:
        """What to tell about a checkpoint that could not be written. Removes what was written of it."""
        staged = staging_folder(run_folder)
        written = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
        shutil.rmtree(staged, ignore_errors=True)
        free = shutil.disk_usage(run_folder).free
        last = find_last(run_folder, run=None).folder
        kept = "There is no other complete one." if last is None else f"The last complete one is {last}."
        return CheckpointError(
            f"{checkpoint_name(step)} could not be written to {run_folder}: {error}. {written / 1e6:,.0f} MB of it "
            f"were written, and {free / 1e6:,.0f} MB are free now that they are removed. {kept} Free space, or lower "
            "save_total_limit, then resume with resume_from_checkpoint=True."
        )
