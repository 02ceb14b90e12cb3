"""The structure of a flat row: trees, each with a trunk and its branches.

A trunk attends to itself; a branch attends to its trunk and to itself, never to another branch. A tree without
branches is an ordinary sequence. Everything that kernels need is computed from the layout on the host, once for all
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
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
    """A trunk or a branch: consecutive tokens of the flat row, and the trunk that they see before themselves."""

    start: int
    length: int
    trunk_start: int
    trunk_length: int  # 0 for a trunk itself


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
        """Maximum number of keys that a query can see: a trunk and its longest branch."""
        return max(tree.trunk + max(tree.branches, default=0) for tree in self.trees)

    def segments(self) -> Iterator[Segment]:
        """All segments, in flat order."""
        start = 0
        for tree in self.trees:
            trunk_start = start
            yield Segment(start, tree.trunk, trunk_start, 0)
            start += tree.trunk
            for length in tree.branches:
                yield Segment(start, length, trunk_start, tree.trunk)
                start += length

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed at the first call with `key` and cached for other layers and the backward."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made
