"""Flat attention as one kernel over blocks of 128 x 128 tokens: flex_attention with a mask built from the layout.

The descendants of a segment directly follow it, so without a window the queries that see a key are an interval of the
flat row: from the key itself to the last token of its segment's descendants. Three numbers per token therefore
describe the mask of a forest of any depth, sliding windows included, and one compiled kernel serves every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from prefrl.models.attention.segments import Layout

BLOCK = 128


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None
) -> Tensor:
    """Attention over a flat row; see `attention.flat_attention`.

    Returns:
        [1, T, H, D].
    """
    total = query.size(2)
    padding = bucket(total) - total
    mask = layout.once(("blocks", window, query.device), lambda: block_mask(layout, window, query.device))
    # Contiguous even without padding: the compiled kernel expects one memory layout.
    query, key, value = (pad(x, (0, 0, 0, padding)).contiguous() for x in (query, key, value))
    # Compiled code depends on the autocast state, and the inputs already have the right dtype.
    with torch.autocast(query.device.type, enabled=False):
        output = _compiled(query.dtype, query.size(1), key.size(1), query.size(3), value.size(3), scaling)(
            query, key, value, mask
        )
    return output[:, :, :total].transpose(1, 2)


def bucket(total: int) -> int:
    """Number of tokens after padding: whole blocks, at least two, since torch compiles a size of 1 as a constant."""
    return max(2, -(-total // BLOCK)) * BLOCK


@cache
def _compiled(*shape_and_scaling: Any) -> Callable[..., Tensor]:
    """flex_attention for one kind of inputs, compiled once with and once without gradients.

    The number of blocks is dynamic: steps of all sizes share one kernel, so buckets can be small. After 8 variants of
    a function torch stops compiling it and silently computes all T x T scores. It counts variants per code object,
    hence one code object for each kind of inputs; and `fullgraph` turns such a fallback into an error.
    """
    scaling: float | None = shape_and_scaling[-1]

    def attend_to_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        is_grouped = query.size(1) != key.size(1)
        output: Tensor = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=is_grouped)
        return output

    own = FunctionType(
        attend_to_blocks.__code__.replace(), attend_to_blocks.__globals__, closure=attend_to_blocks.__closure__
    )
    compiled: Callable[..., Tensor] = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled


@dataclass(frozen=True, slots=True)
class _Segments:
    """The segments of a layout, then one of padding up to T tokens, then an empty one, which the number -1 finds."""

    start: Tensor  # [S] int64
    length: Tensor  # [S] int64
    position: Tensor  # [S] int64, of the first token
    parent: Tensor  # [S] int64; -1: none
    family_stop: Tensor  # [S] int64: one past the last token of the segment and its descendants
    is_block: Tensor  # [S] bool: its tokens see all of it

    @classmethod
    def of(cls, layout: Layout, total: int) -> _Segments:
        """On the host."""
        used = sum(layout.lengths)
        segments = layout.segments
        family_stops = [segment.stop for segment in segments]
        for number, (_, parent) in reversed(list(enumerate(layout.forest))):
            if parent >= 0:
                family_stops[parent] = max(family_stops[parent], family_stops[number])
        return cls(
            start=torch.tensor([*(s.start for s in segments), used, total]),
            length=torch.tensor([*layout.lengths, total - used, 0]),
            position=torch.tensor([*(s.position for s in segments), 0, 0]),
            parent=torch.tensor([*(parent for _, parent in layout.forest), -1, -1]),
            family_stop=torch.tensor([*family_stops, total, total]),
            is_block=torch.tensor([*(i in layout.blocks for i in range(len(segments))), False, False]),
        )


@dataclass(frozen=True, slots=True)
class _Sight:
    """What tokens see: a query sees a key if key < reach[query], query < stop[key] and lost[query] < position[key]."""

    reach: Tensor  # [T] int32: one past the last token that it sees: itself, or the end of its block
    stop: Tensor  # [T] int32: one past the last token of the key's segment and its descendants
    position: Tensor  # [T] int32: number of tokens before it in its segment and in the ancestors
    lost: Tensor  # [T] int32: the last position that the window has left behind; below 0: none

    @classmethod
    def of(cls, segments: _Segments, window: int) -> _Sight:
        """On the host."""
        ends = torch.where(segments.is_block, segments.start + segments.length, 0)
        # A window never hides a token of the query's own block.
        firsts = torch.where(segments.is_block, segments.position - 1, torch.iinfo(torch.int32).max)
        columns = (segments.family_stop, segments.position - segments.start, ends, firsts)
        stop, shift, end, first = (x.repeat_interleave(segments.length) for x in columns)
        token = torch.arange(len(shift))
        position = token + shift
        reach, lost = torch.maximum(token + 1, end), torch.minimum(position - window, first)
        return cls(reach.int(), stop.int(), position.int(), lost.int())


def block_mask(layout: Layout, window: int | None, device: torch.device) -> BlockMask:
    """The layout as a flex_attention block mask: which blocks hold some visible pairs, and which only visible pairs.

    It is built on the host with memory for (T / 128)^2 entries, and sent to the device without waiting.
    """
    total = bucket(sum(layout.lengths))
    segments, limit = _Segments.of(layout, total), total if window is None else window
    sight = _Sight.of(segments, limit)
    touched, full = _touched(segments, total, limit), _full(sight)
    partial = touched & ~full
    ordered = [_ordered(blocks) for blocks in (partial, full, partial.t(), full.t())]
    (kv, full_kv, q, full_q) = (tuple(x[None, None].to(device, non_blocking=True) for x in pair) for pair in ordered)
    reach, stop, position, lost = (
        x.to(device, non_blocking=True) for x in (sight.reach, sight.stop, sight.position, sight.lost)
    )

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < reach[query]) & (query < stop[key]) & (lost[query] < position[key])

    return BlockMask(
        seq_lengths=(total, total),
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=q[0],
        q_indices=q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
    )


def _touched(segments: _Segments, total: int, window: int) -> Tensor:
    """[blocks, blocks] bool: query-key blocks with some visible pairs.

    Segments are cut where blocks begin. What the queries of a piece see of an ancestor, or of their own segment, is an
    interval of keys, so pieces and ancestors are enumerated, not tokens.
    """
    cuts = torch.unique(torch.cat([segments.start, torch.arange(0, total, BLOCK)]))
    first = cuts[:-1]
    last = cuts[1:] - 1
    segment = torch.searchsorted(segments.start, first, right=True) - 1
    shift = segments.position[segment] - segments.start[segment]
    seen = []  # row of blocks, first column, one past the last column
    is_whole = segments.is_block[segment]  # whether the queries see all of the segment
    while (segment >= 0).any():
        start, length, position = segments.start[segment], segments.length[segment], segments.position[segment]
        begin = start + (first + shift - window + 1 - position).clamp(min=0).minimum(length)
        stop = start + (last + shift + 1 - position).clamp(min=0).minimum(length)
        begin, stop = torch.where(is_whole, start, begin), torch.where(is_whole, start + length, stop)
        is_whole = torch.zeros_like(is_whole)
        column = begin // BLOCK
        seen.append(torch.stack([first // BLOCK, column, torch.where(begin < stop, -(-stop // BLOCK), column)]))
        segment = segments.parent[segment]
    return _count(*torch.cat(seen, 1), num_blocks=total // BLOCK) > 0


def _full(sight: _Sight) -> Tensor:
    """[blocks, blocks] bool: query-key blocks with only visible pairs."""
    stop, position, lost = (x.long() for x in (sight.stop, sight.position, sight.lost))
    key = torch.arange(len(stop))
    first_whole = -(-key // BLOCK)
    columns = _count(
        key // BLOCK, first_whole, torch.maximum(first_whole, stop // BLOCK), num_blocks=len(key) // BLOCK
    )
    most_lost, first_position = lost.view(-1, BLOCK).amax(1), position.view(-1, BLOCK).amin(1)
    return (columns.t() == BLOCK) & (most_lost[:, None] < first_position)


def _count(row: Tensor, first: Tensor, stop: Tensor, *, num_blocks: int) -> Tensor:
    """[blocks, blocks] int64: how many of a row's intervals first .. stop - 1 contain a column."""
    width = num_blocks + 1
    steps = torch.zeros(num_blocks * width, dtype=torch.long)
    ones = torch.ones_like(first)
    steps.index_add_(0, row * width + first, ones).index_add_(0, row * width + stop, -ones)
    return steps.view(num_blocks, width).cumsum(1)[:, :num_blocks]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] int32 how many blocks are set, and [rows, columns] int32 their columns, followed by the other columns."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    # Compiled kernels take the columns of a row for neighbors in memory, which those of a transposed matrix are not.
    return blocks.sum(1, dtype=torch.int32), columns.contiguous()
