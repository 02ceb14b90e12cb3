"""Seals a folder with a manifest of its files, so that a reader knows whether all of them are there and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

__all__ = [
    "MANIFEST",
    "FileSeal",
    "Manifest",
    "manifest_of",
    "parsed",
    "problem_of",
    "seal",
    "seals_of",
    "sizes_in",
    "sync_folder",
    "text_of",
    "write_synced",
]

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
