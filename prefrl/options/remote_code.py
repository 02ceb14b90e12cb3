"""Code that comes with a model and runs in this process: which version of it is not left to chance unnoticed."""

from __future__ import annotations

import os
import re

__all__ = ["unpinned_code"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


def unpinned_code(model: str | os.PathLike[str], revision: str | None) -> str | None:
    """A warning if the code of a model on the Hub runs in whatever version the Hub has today, else None.

    Args:
        model: Name or path of a model that is loaded with `trust_remote_code=True`.
        revision: Branch, tag or commit; only a commit always means the same code.
    """
    if os.path.isdir(model) or (revision is not None and _COMMIT.fullmatch(revision)):
        return None
    return (
        f"trust_remote_code=True with revision={revision!r}: code from the repository of {os.fspath(model)!r} runs in "
        "this process, and its owner can change it at any time. Set the revision to the 40 digits of a commit."
    )
