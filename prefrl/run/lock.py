"""One process at a time writes to a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from prefrl.errors import ConfigError

__all__ = ["only_writer"]

_FILE = ".writer"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def only_writer(run_folder: Path) -> Iterator[None]:
    """Context in which this process is the only one that trains in a folder.

    The kernel holds the lock and releases it when the process ends, however it ends, so nothing is left to clean up.

    Args:
        run_folder: Created if it does not exist.

    Raises:
        ConfigError: The folder cannot be written to, or another process trains in it: names its host and process id.
    """
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(run_folder)!r} cannot be written to: {error.strerror}. Choose a folder that can."
        ) from error
    try:
        _lock(descriptor, run_folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, run_folder: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            _log.warning("%s: its file system has no locks, so a second run in it would not be noticed", run_folder)
            return
        holder = _read(descriptor)
        raise ConfigError(
            f"output_dir={str(run_folder)!r} is in use: process {holder.get('pid', '?')} on host "
            f"{holder.get('host', '?')} trains in it. Choose another folder, or stop that process."
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)


def _read(descriptor: int) -> dict[str, object]:
    try:
        values = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
