"""Second names for the files of a folder, which may then be deleted under the first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["link_files"]


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
