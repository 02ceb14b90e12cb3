"""Checks, before any work is done, that a run can write what it will have to write."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from prefrl.errors import ConfigError

__all__ = ["check_space", "check_writable"]


def check_writable(run_folder: Path, *, option: str = "output_dir") -> None:
    """Check that files can be written to a folder, which is created if it does not exist.

    Args:
        run_folder: The folder.
        option: The option that names it, for the message.

    Raises:
        ConfigError: They cannot.
    """
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}={str(run_folder)!r} cannot be written to: {error.strerror}. Choose another folder."
        ) from error


def check_space(run_folder: Path, *, needed: int) -> None:
    """Check that a checkpoint fits on the disk.

    Args:
        run_folder: The run's folder.
        needed: Bytes of a checkpoint.

    Raises:
        ConfigError: It does not: names both numbers.
    """
    free = shutil.disk_usage(run_folder).free
    if free < needed:
        raise ConfigError(
            f"output_dir={str(run_folder)!r} has {free / 1e6:,.0f} MB free, and a checkpoint needs "
            f"{needed / 1e6:,.0f} MB. Free space, choose another folder, or set save_strategy='no' or "
            "save_only_model=True."
        )
