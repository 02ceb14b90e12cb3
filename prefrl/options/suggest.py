"""Suggestions for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from prefrl.errors import ConfigError

__all__ = ["check_known", "nearest"]


def nearest(name: str, known: Collection[str], *, otherwise: str | None = None) -> str:
    """A question with the known name most similar to `name`. If none is similar: `otherwise`, or all known names.

    Args:
        name: The unknown name.
        known: The possible names.
        otherwise: Text to return if the list of names is too long to print.
    """
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if matches:
        return f"Did you mean {matches[0]!r}?"
    return otherwise or f"Known: {', '.join(sorted(known))}."


def check_known(option: str, name: str, known: Collection[str], what: str) -> None:
    """Reject a name that an option does not know.

    Raises:
        ConfigError: Has a suggestion.
    """
    if name not in known:
        raise ConfigError(f"{option}={name!r}: unknown {what}. {nearest(name, known)}")
