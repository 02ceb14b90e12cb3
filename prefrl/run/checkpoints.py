"""The checkpoints in a run's folder. Each is written aside, sealed and renamed: it is whole or it is not there.

checkpoint-<step>/           sealed checkpoints
.saving/checkpoint-<step>/   the one that is being written
.deleting/                   one that is being deleted
.uploading/checkpoint-<step>/ one that is being uploaded, see `prefrl.run.uploads`
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from prefrl.errors import ConfigError
from prefrl.run.seal import FileSeal, manifest_of, problem_of, seal, sync_folder

__all__ = [
    "WORDS_TO_RESUME",
    "WRITER",
    "FoundCheckpoint",
    "check_has_state",
    "check_whole",
    "checkpoint_name",
    "clean",
    "find_last",
    "move_in_place",
    "own_checkpoints",
    "publish",
    "rotate",
    "staging_folder",
    "step_of",
    "link_files",
]

WRITER = "written_by.json"  # in a checkpoint with the state of training: which processes wrote it
# Words for values of `resume_from_checkpoint` that are no folders.
WORDS_TO_RESUME: dict[str, bool] = {"auto": True, "true": True, "disable": False, "false": False}
_MODEL_ONLY = "it holds a model without the training state (from save_only_model=True)"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after an optimizer step, HuggingFace's."""
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """The optimizer steps of a checkpoint by its name; None: it is not the name of one."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match.group(1))


def staging_folder(run_folder: Path) -> Path:
    """Where a checkpoint is written before it is sealed."""
    return run_folder / ".saving"


def publish(
    run_folder: Path, *, run: str, step: int, resumable: bool, known: Mapping[str, FileSeal] = MappingProxyType({})
) -> Path:
    """Seal the checkpoint that was written aside, and move it to its place.

    Args:
        run_folder: The run's folder.
        run: Id of the run.
        step: Optimizer steps that were done.
        resumable: Whether it holds the state of training besides the model.
        known: Seals of some of its files.

    Returns:
        Its folder.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    staged = staging_folder(run_folder) / checkpoint_name(step)
    seal(staged, run=run, step=step, resumable=resumable, known=known)
    return move_in_place(run_folder, staged)


def move_in_place(run_folder: Path, staged: Path) -> Path:
    """Move a whole checkpoint from the staging folder to its place, and return that; another one there is deleted."""
    final = run_folder / staged.name
    if final.exists():  # an interruption between the two renames is mended by `clean`
        _hide(run_folder, final)
    os.rename(staged, final)
    staged.parent.rmdir()
    sync_folder(run_folder)
    _delete_hidden(run_folder)
    return final


def clean(run_folder: Path) -> None:
    """Finish or undo what an interrupted process left: a sealed checkpoint that is not in its place is moved there.

    No other process may write to the folder.
    """
    staging = staging_folder(run_folder)
    for staged in [] if staging.is_symlink() else _checkpoints_in(staging).values():
        if problem_of(staged) is None:
            move_in_place(run_folder, staged)
    _delete(staging)
    _delete_hidden(run_folder)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint to resume from."""

    folder: Path | None  # None: there is none
    unusable: list[str] = field(default_factory=list)  # newer ones of the same run, each with the reason
    foreign: list[str] = field(default_factory=list)  # newer ones of other runs


def find_last(run_folder: Path, *, run: str | None, before: int | None = None) -> FoundCheckpoint:
    """The last whole checkpoint of a run.

    Args:
        run_folder: The run's folder.
        run: Id of the run; None: of any run.
        before: Only checkpoints of earlier steps; None: all.
    """
    unusable: list[str] = []
    foreign: list[str] = []
    for step, folder in sorted(_checkpoints_in(run_folder).items(), reverse=True):
        if before is not None and step >= before:
            continue
        manifest = manifest_of(folder)
        if manifest is not None and run is not None and manifest.run != run:
            foreign.append(folder.name)
            continue
        reason = problem_of(folder) if manifest is None or manifest.resumable else _MODEL_ONLY
        if reason is None:
            return FoundCheckpoint(folder, unusable, foreign)
        unusable.append(f"{folder.name}: {reason}")
    return FoundCheckpoint(None, unusable, foreign)


def check_whole(folder: Path, *, reads_files: bool = True) -> None:
    """Refuse a folder of `resume_from_checkpoint` that is no whole checkpoint.

    Args:
        folder: The folder.
        reads_files: Whether the bytes of files are compared, too; see `problem_of`.

    Raises:
        ConfigError: It is missing, holds the model only, or is damaged.
    """
    hint = "Set it to True to resume from the last complete checkpoint in output_dir."
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint={str(folder)!r}: there is no such folder. {hint}")
    check_has_state(folder)
    problem = problem_of(folder, reads_files=reads_files)
    if problem is not None:
        raise ConfigError(f"resume_from_checkpoint={str(folder)!r}: {problem}. {hint}")


def check_has_state(folder: Path) -> None:
    """Refuse a checkpoint without the state of training.

    Raises:
        ConfigError: It holds no training state.
    """
    if not (folder / WRITER).exists():
        raise ConfigError(
            f"resume_from_checkpoint={str(folder)!r} has no {WRITER}: it contains a model without the training state "
            "(from save_only_model=True, save_model() or another library). Start a new training from its weights, "
            f"model={str(folder)!r}, or resume from a complete checkpoint."
        )


def rotate(run_folder: Path, *, run: str, limit: int | None, best: str | None) -> None:
    """Delete all but the last `limit` checkpoints of a run.

    The last one and the best one are never deleted. Checkpoints are ordered by step, never by time.

    Args:
        run_folder: The run's folder.
        run: Id of the run; checkpoints of other runs are left alone.
        limit: How many to keep; None: all.
        best: Path of the best one.
    """
    if limit is None or limit <= 0:
        return
    own = own_checkpoints(run_folder, run=run)
    last_first = [own[step] for step in sorted(own, reverse=True)]
    kept = set(last_first[:1]) | {folder for folder in last_first if best is not None and folder == Path(best)}
    for folder in last_first:
        if len(kept) < limit:
            kept.add(folder)
    for folder in last_first:
        if folder not in kept:
            _hide(run_folder, folder)
            _delete_hidden(run_folder)


def own_checkpoints(run_folder: Path, *, run: str) -> dict[int, Path]:
    """The sealed checkpoints of a run, by step."""
    manifests = {step: (folder, manifest_of(folder)) for step, folder in _checkpoints_in(run_folder).items()}
    return {
        step: folder for step, (folder, manifest) in manifests.items() if manifest is not None and manifest.run == run
    }


def _checkpoints_in(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    steps = [(step_of(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return {step: path for step, path in steps if step is not None}


def _hide(run_folder: Path, checkpoint: Path) -> None:
    """Take a checkpoint out of sight at once: an interruption never leaves a part of one."""
    _delete_hidden(run_folder)
    os.rename(checkpoint, run_folder / ".deleting")


def _delete_hidden(run_folder: Path) -> None:
    _delete(run_folder / ".deleting")


def _delete(folder: Path) -> None:
    """Delete a folder, or in its place a link, whose target stays."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def link_files(source: Path, target: Path) -> None:
    """Give the files of a folder second names in another one, which may be there; see `os.link`.

    Where the file system has no such names, files are copied.
    """
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:  # of an upload of the same step that has not ended
        pass
    except OSError:
        shutil.copyfile(source, target)
