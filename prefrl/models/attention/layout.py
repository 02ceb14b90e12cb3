"""The structure of a flat row: a forest of segments.

A segment continues its parent, if it has one: its tokens see all tokens of its ancestors, and those of the segment up
to themselves, never those of a sibling. In a block, the tokens of an image that its model reads so, all see all of the
segment. A segment without parent and children is an ordinary sequence. Segments are laid end to end in depth-first
order, so the descendants of a segment directly follow it. Everything that kernels need is computed from the layout on
the host, once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

__all__ = ["Layout", "Segment"]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of the flat row, and what they see before themselves."""

    start: int
    length: int
    position: int  # of its first token: the number of tokens of its ancestors
    ancestors: tuple[int, ...]  # numbers of the segments that it continues, root first

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.length


@dataclass(eq=False)  # not frozen: torch 2.11 would compile layers for each value of its fields
class Layout:
    """The segments of a flat row, laid end to end."""

    # The length of each segment, and the number of its parent; -1: none. In depth-first order.
    forest: tuple[tuple[int, int], ...]
    num_parts: int = 1  # number of processes that each have an equal part of the tokens
    # Numbers of the segments whose tokens see all tokens of the segment, also those after themselves: images.
    blocks: frozenset[int] = frozenset()
    # Sliding windows that attention layers passed; the self-check reads them.
    windows: set[int | None] = field(default_factory=set)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Lengths of all segments, in flat order."""
        return [length for length, _ in self.forest]

    @cached_property
    def longest(self) -> int:
        """Maximum number of keys that a query can see: a segment with its ancestors."""
        return max(segment.position + segment.length for segment in self.segments)

    @cached_property
    def segments(self) -> list[Segment]:
        """All segments, in flat order.

        Raises:
            ValueError: They are not in depth-first order.
        """
        segments: list[Segment] = []
        path: tuple[int, ...] = ()  # to the last segment, itself included
        start = position = 0
        for number, (length, parent) in enumerate(self.forest):
            while path and path[-1] != parent:
                position -= segments[path[-1]].length
                path = path[:-1]
            if not path and parent >= 0:
                raise ValueError(f"segment {number} follows no descendant of its parent {parent}: needs to")
            segments.append(Segment(start, length, position, path))
            path = (*path, number)
            start, position = start + length, position + length
        return segments

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed at the first call with `key` and cached for other layers and the backward."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made
