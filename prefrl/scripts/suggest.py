"""What to say about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["nearest"]


def nearest(name: str, known: Collection[str], *, otherwise: str | None = None) -> str:
    """The known name that is most like `name`, as a question; without one, `otherwise` or the list of all.

    Args:
        name: What was given.
        known: What could have been meant.
        otherwise: For a list that is too long to print.
    """
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if matches:
        return f"Did you mean {matches[0]!r}?"
    return otherwise or f"Known: {', '.join(sorted(known))}."
