"""How the tokens of a flat row belong together: trees of a trunk and its branches.

A trunk attends to itself, a branch to the trunk and to itself, never to another branch. A tree without branches is an
ordinary sequence. All that kernels need to know about a layout is worked out on the host, once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Layout", "Segment", "Tree"]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Tree:
    """Lengths, in flat order: a trunk, then branches that each attend to the trunk and themselves."""

    trunk: int
    branches: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all segments, trunk first."""
        return (self.trunk, *self.branches)


@dataclass(frozen=True, slots=True)
class Segment:
    """A trunk or a branch: consecutive tokens of the flat row, with the trunk that they see before themselves."""

    start: int
    length: int
    trunk_start: int
    trunk_length: int  # 0 of a trunk itself


@dataclass(frozen=True, eq=False)
class Layout:
    """The trees of a flat row, end to end."""

    trees: tuple[Tree, ...]
    num_parts: int = 1  # processes that have an equal part of the tokens each
    # Sliding windows that attention layers asked for: what the self-check reads.
    windows: set[int | None] = field(default_factory=set)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Of all segments, in flat order."""
        return [length for tree in self.trees for length in tree.lengths]

    @property
    def longest(self) -> int:
        """Keys that a query can see at most: trunk and longest branch."""
        return max(tree.trunk + max(tree.branches, default=0) for tree in self.trees)

    def segments(self) -> Iterator[Segment]:
        """In flat order."""
        start = 0
        for tree in self.trees:
            trunk_start = start
            yield Segment(start, tree.trunk, trunk_start, 0)
            start += tree.trunk
            for length in tree.branches:
                yield Segment(start, length, trunk_start, tree.trunk)
                start += length

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives, made at the first call with `key` and kept for other layers and the backward pass."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made
