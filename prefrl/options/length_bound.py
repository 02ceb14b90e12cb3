"""How long rows of a dataset may be."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LengthBound"]


@dataclass(frozen=True)
class LengthBound:
    """What options say about the length of rows.

    Args:
        max_length: Tokens of a prepared row; None: no limit.
        options: How the message calls the options to lower.
        sampled: Tokens that are sampled after each row, which is a prompt.
    """

    max_length: int | None
    options: str
    sampled: int = 0
