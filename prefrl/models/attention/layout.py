"""The structure of a flat row: trees, each with a trunk and its branches.

A trunk attends to itself; a branch attends to its trunk and to itself, never to another branch. A tree without
branches is an ordinary sequence. Everything that kernels need is computed from the layout on the host, once for all
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

__all__ = ["Layout", "Segment", "Tree"]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Tree:
    """Lengths, in flat order: a trunk, then branches that each attend to the trunk and to themselves."""

    trunk: int
    branches: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all segments, trunk first."""
        return (self.trunk, *self.branches)


@dataclass(frozen=True, slots=True)
class Segment:
    """A trunk or a branch: consecutive tokens of the flat row, and what they see before themselves."""

    start: int
    length: int
    ancestors: tuple[int, ...]  # numbers of the segments that it continues, in order: none for a trunk, else its trunk

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class Layout:
    """The trees of a flat row, laid end to end."""

    trees: tuple[Tree, ...]
    num_parts: int = 1  # number of processes that each have an equal part of the tokens
    # Sliding windows that attention layers passed; the self-check reads them.
    windows: set[int | None] = field(default_factory=set)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Lengths of all segments, in flat order."""
        return [length for tree in self.trees for length in tree.lengths]

    @property
    def longest(self) -> int:
        """Maximum number of keys that a query can see: a segment with its ancestors."""
        return max(self.num_before(segment) + segment.length for segment in self.segments)

    @cached_property
    def segments(self) -> list[Segment]:
        """All segments, in flat order."""
        segments: list[Segment] = []
        start = 0
        for tree in self.trees:
            trunk = len(segments)
            for length in tree.lengths:
                segments.append(Segment(start, length, () if len(segments) == trunk else (trunk,)))
                start += length
        return segments

    def num_before(self, segment: Segment) -> int:
        """Number of tokens of its ancestors."""
        return sum(self.segments[number].length for number in segment.ancestors)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed at the first call with `key` and cached for other layers and the backward."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made
