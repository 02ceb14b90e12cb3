"""The structure of a flat row, a forest of segments, and attention over it segment by segment.

A segment continues its parent, if it has one: its tokens see all tokens of its ancestors, and those of the segment up
to themselves, never those of a sibling. In a block, the tokens of an image that its model reads so, all see all of the
segment. A segment without parent and children is an ordinary sequence. Segments are laid end to end in depth-first
order, so the descendants of a segment directly follow it. Everything that kernels need is computed from the layout on
the host, once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

Made = TypeVar("Made")

# From this many keys on, plain causal attention is so much faster on some chips that queries are worth repeating.
_LONG = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of the flat row, and what they see before themselves."""

    start: int
    length: int
    position: int  # of its first token: the number of tokens of its ancestors
    ancestors: tuple[int, ...]  # numbers of the segments that it continues, root first
    # Whether the queries of its ancestors are computed once more, and dropped, to make its attention plainly causal.
    repeats_ancestors: bool

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
    # What follows from the forest, found at construction.
    lengths: list[int] = field(init=False)  # of all segments, in flat order
    segments: list[Segment] = field(init=False)  # in flat order
    longest: int = field(init=False)  # the most keys that a query can see: a segment with its ancestors

    def __post_init__(self) -> None:
        """Find the segments.

        Raises:
            ValueError: They are not in depth-first order.
        """
        self.lengths, self.segments, self.longest = [length for length, _ in self.forest], [], 0
        path: tuple[int, ...] = ()  # to the last segment, itself included
        start = position = 0
        for number, (length, parent) in enumerate(self.forest):
            while path and path[-1] != parent:
                position -= self.lengths[path[-1]]
                path = path[:-1]
            if not path and parent >= 0:
                raise ValueError(f"segment {number} follows no descendant of its parent {parent}: needs to")
            is_long = position + length >= _LONG and 2 * position <= length
            self.segments.append(Segment(start, length, position, path, is_long))
            path = (*path, number)
            start, position = start + length, position + length
            self.longest = max(self.longest, position)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed at the first call with `key` and cached for other layers and the backward."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


# Number of queries that share one explicit mask, which bounds the mask's memory.
_ROWS_PER_MASK = 512


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over a flat row; see `attention.flat_attention`.

    Returns:
        [1, T, H, D].
    """
    outputs: list[Tensor] = []
    queries, keys, values = (torch.split(x, layout.lengths, dim=2) for x in (query, key, value))
    for number, segment in enumerate(layout.segments):
        q, k, v = queries[number], keys[number], values[number]
        is_block = number in layout.blocks
        if segment.ancestors:
            seen = [*segment.ancestors, number]
            k, v = (torch.cat([parts[each] for each in seen], 2) for parts in (keys, values))
            if window is None and not is_block and segment.repeats_ancestors:
                q = torch.cat([queries[each] for each in seen], 2)
        pieces = [_block(q, k, v, window)] if is_block else _visible(q, k, v, layout, window)
        for rows, k, v, mask in pieces:
            if rows.is_cuda and mask is not None and k.size(1) != rows.size(1):
                # CUDA's fast kernels support a mask or grouped heads, but not both.
                k, v = (x.repeat_interleave(rows.size(1) // k.size(1), dim=1) for x in (k, v))
            output = scaled_dot_product_attention(
                rows,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None and not is_block,
                scale=scaling,
                enable_gqa=k.size(1) != rows.size(1),
            )
            outputs.append(output.transpose(1, 2)[:, -segment.length :])
    return torch.cat(outputs, dim=1)


def is_long(layout: Layout) -> bool:
    """Whether most of the work of a layout is plain causal attention of long sequences, if ancestors are repeated."""

    def count() -> bool:
        work = [segment.length * (segment.position + segment.length / 2) for segment in layout.segments]
        long = sum(each for each, segment in zip(work, layout.segments, strict=True) if segment.repeats_ancestors)
        return not layout.blocks and long >= 0.8 * sum(work)

    return layout.once("is long", count)


_Piece = tuple["Tensor", "Tensor", "Tensor", "Tensor | None"]


def _visible(q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None) -> Iterator[_Piece]:
    """The queries, in order, with the keys and values that they may see; the mask is None for plain causal attention.

    The queries are the last positions of the keys.
    """
    num_queries, num_keys = q.size(2), k.size(2)
    if window is not None and window >= num_keys:
        window = None
    if window is None and num_queries == num_keys:
        yield q, k, v, None
    elif window is None and q.is_cuda:
        yield q, k, v, causal_lower_right(num_queries, num_keys)
    else:
        first = num_keys - num_queries
        for rows in torch.split(q, _ROWS_PER_MASK, dim=2):
            last = first + rows.size(2)
            start = 0 if window is None else max(0, first + 1 - window)
            visible = slice(start, last)
            yield rows, k[:, :, visible], v[:, :, visible], _mask(layout, rows.size(2), last - start, window, q)
            first = last


def _block(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> _Piece:
    """The queries of a segment that sees all of itself, with all keys. A window ends before its own segment."""
    num_queries, num_keys = q.size(2), k.size(2)
    if window is None or window >= num_keys:
        return q, k, v, None
    key = torch.arange(num_keys, device=q.device)
    query = key[-num_queries:, None]
    is_hidden = (query - key >= window) & (key < num_keys - num_queries)
    mask = torch.zeros(is_hidden.shape, dtype=q.dtype, device=q.device)
    return q, k, v, mask.masked_fill_(is_hidden, float("-inf"))


def _mask(layout: Layout, rows: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """[rows, keys] additive mask for the last `rows` of `keys` positions: a part of one mask for all segments.

    It is copied: kernels for CUDA check the strides of a mask only, and a view that begins at an odd place makes
    them read a misaligned address, after which the process can use its device no more.
    """
    before = layout.longest

    def make() -> Tensor:
        most_rows = min(before, _ROWS_PER_MASK)
        distance = torch.arange(most_rows)[:, None] - torch.arange(-before, most_rows)
        distance = distance.to(like.device, non_blocking=True)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill_(hidden, float("-inf"))

    mask = layout.once(("mask", window, like.dtype, like.device), make)
    part = mask[:rows, before - (keys - rows) : before + rows]
    return part.clone(memory_format=torch.contiguous_format)
