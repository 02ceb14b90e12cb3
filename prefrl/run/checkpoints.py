"""The checkpoints in a run's folder. Each is written aside, sealed and renamed: it is whole or it is not there.

A seal is a manifest of a folder's files, so that a reader knows whether all of them are there and unchanged.

checkpoint-<step>/           sealed checkpoints
.saving/checkpoint-<step>/   the one that is being written
.deleting/                   one that is being deleted
.uploading/checkpoint-<step>/ one that is being uploaded, see `prefrl.run.uploads`
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from prefrl.errors import ConfigError

MANIFEST = "manifest.json"
_FORMAT = 2
_HASH = "sha256"  # of the manifest's other values
# What transformers, peft, accelerate and DeepSpeed load from a folder if it is there.
_LOADED = re.compile(
    r"model.*\.safetensors(\.index\.json)?|pytorch_model.*|adapter_model\.(bin|safetensors)"
    r"|optimizer(\.bin|\.pt|_\d+)|scheduler\.pt|scaler\.pt|rng_state.*\.pth|.*_states\.pt"
)
# Files are read for their hash side by side: hashing releases the interpreter's lock.
_READERS = 4


@dataclass(frozen=True)
class Manifest:
    """What a sealed folder holds."""

    run: str  # id of the run that wrote it
    step: int  # optimizer steps that were done
    resumable: bool  # whether it holds the state of training besides the model
    files: dict[str, FileSeal]  # by path relative to the folder


@dataclass(frozen=True)
class FileSeal:
    """The size and hash of a file."""

    size: int  # bytes
    sha256: str


def seal(
    folder: Path, *, run: str, step: int, resumable: bool, known: Mapping[str, FileSeal] = MappingProxyType({})
) -> None:
    """Write all files of a folder to the disk, then its manifest.

    Args:
        folder: Nothing else may write to it any more.
        run: Id of the run.
        step: Optimizer steps that were done.
        resumable: Whether the folder holds the state of training besides the model.
        known: Seals of some of the files, see `seals_of`.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
    """
    names = sorted(sizes_in(folder))
    seals = {**known, **seals_of(folder, [name for name in names if name not in known])}
    write_synced(folder / MANIFEST, text_of(Manifest(run, step, resumable, {name: seals[name] for name in names})))
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync_folder(inner)
    sync_folder(folder)


def sizes_in(folder: Path) -> dict[str, int]:
    """The bytes of each file of a folder that a manifest would list, by path relative to the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def seals_of(folder: Path, names: Sequence[str]) -> dict[str, FileSeal]:
    """Write files to the disk, and return their seals.

    Raises:
        OSError: A file cannot be read, or not be written to the disk.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(names, readers.map(lambda name: _seal_file(folder / name), names), strict=True))


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a sealed folder; None if it has none that can be read."""
    try:
        return parsed((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def text_of(manifest: Manifest) -> str:
    """What a file `manifest.json` holds."""
    values = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({**values, _HASH: _hash_of(values)}, indent=1)


def parsed(text: bytes) -> Manifest | None:
    """The manifest that a file `manifest.json` holds; None if it holds none, or not what was written."""
    try:
        values = json.loads(text)
        is_whole = values.pop(_HASH) == _hash_of(values)
        files = {name: FileSeal(**value) for name, value in values["files"].items()}
        return Manifest(values["run"], values["step"], values["resumable"], files) if is_whole else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _hash_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def problem_of(folder: Path, *, reads_files: bool = True) -> str | None:
    """What is wrong with a sealed folder: the first file that is missing, changed or added. None: it is whole.

    Other files may be added, such as notes. An added file is a problem if it has the name of one that is loaded.

    Args:
        folder: The sealed folder.
        reads_files: Whether the bytes of files are compared, too, which takes a while; if not, only their sizes are.
    """
    manifest = manifest_of(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or damaged"
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.size:
            return f"{name} has {path.stat().st_size} bytes instead of {expected.size}"
    added = _added(folder, manifest)
    if added:
        return f"{added[0]} was added later, and would be loaded with the checkpoint: move it to another folder"
    if not reads_files:
        return None
    names = list(manifest.files)
    with ThreadPoolExecutor(_READERS) as readers:
        hashes = readers.map(lambda name: _sha256(folder / name), names)
        changed = [name for name, found in zip(names, hashes, strict=True) if found != manifest.files[name].sha256]
    return f"{changed[0]} is damaged: its bytes differ from those that were saved" if changed else None


def _added(folder: Path, manifest: Manifest) -> list[str]:
    """The files and folders that a manifest does not list, and that loaders look for."""
    listed = {PurePosixPath(name) for name in manifest.files}
    folders = {parent for path in listed for parent in path.parents}
    found = [path for parent in folders for path in (folder / parent).iterdir() if _LOADED.fullmatch(path.name)]
    found += folder.glob("*/adapter_model.*")  # such folders are loaded as further adapters
    return sorted({path.relative_to(folder).as_posix() for path in found} - {str(path) for path in listed | folders})


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal_file(path: Path) -> FileSeal:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileSeal(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Seal the checkpoint that was written aside, see `seal`, and move it to its place, which is returned.

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
    """The last whole checkpoint of a run, or of any, and only of steps before `before` if that is given."""
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
    """Delete all but the last `limit` checkpoints of a run; None: keep all. Those of other runs are left alone.

    The last one and the best one are never deleted. Checkpoints are ordered by step, never by time.
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
