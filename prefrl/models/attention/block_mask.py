"""Flat attention as one kernel over blocks of 128 x 128 tokens: flex_attention with a mask built from the layout.

A token sees two intervals of the flat row: a part of the trunk, and a part of its own segment up to itself. Three
numbers per token therefore describe the mask completely, sliding windows included, and one compiled kernel serves
every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from prefrl.models.attention.layout import Segment

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.models.attention.layout import Layout

__all__ = ["attend", "block_mask", "bucket", "intervals"]

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
class Intervals:
    """What each token sees: trunk_start <= key < trunk_stop, and own_start <= key <= itself."""

    trunk_start: Tensor  # [T] int32
    trunk_stop: Tensor  # [T] int32; equal to trunk_start where the token sees no trunk
    own_start: Tensor  # [T] int32


def intervals(layout: Layout, total: int, window: int | None) -> Intervals:
    """The intervals of the layout's tokens, on the host. Padding up to `total` is treated as one more sequence."""
    segments = []
    for segment in layout.segments:
        trunk = layout.segments[segment.ancestors[0]] if segment.ancestors else Segment(segment.start, 0, ())
        segments.append((segment.start, segment.length, trunk.start, trunk.stop))
    used = sum(layout.lengths)
    segments.append((used, total - used, used, used))
    start, length, trunk_start, trunk_stop = torch.tensor(segments).unbind(1)
    start, trunk_start, trunk_stop = (x.repeat_interleave(length) for x in (start, trunk_start, trunk_stop))
    own_start = start
    if window is not None:
        token = torch.arange(total)
        own_start = torch.maximum(start, token - window + 1)
        # Distances are measured along trunk and branch, as if the branch followed directly after the trunk.
        trunk_start = torch.maximum(trunk_start, trunk_stop + token - start - window + 1).minimum(trunk_stop)
    return Intervals(trunk_start.int(), trunk_stop.int(), own_start.int())


def block_mask(layout: Layout, window: int | None, device: torch.device) -> BlockMask:
    """The layout as a flex_attention block mask: which blocks hold some visible pairs, and which only visible pairs.

    It is built on the host with memory for (T / 128)^2 entries, and sent to the device without waiting.
    """
    total = bucket(sum(layout.lengths))
    seen = intervals(layout, total, window)
    partial, full = _blocks(seen)
    ordered = [_ordered(blocks) for blocks in (partial, full, partial.t(), full.t())]
    (kv, full_kv, q, full_q) = (tuple(x[None, None].to(device, non_blocking=True) for x in pair) for pair in ordered)
    trunk_start, trunk_stop, own_start = (
        x.to(device, non_blocking=True) for x in (seen.trunk_start, seen.trunk_stop, seen.own_start)
    )

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_trunk = (trunk_start[query] <= key) & (key < trunk_stop[query])
        return in_trunk | ((own_start[query] <= key) & (key <= query))

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


def _blocks(seen: Intervals) -> tuple[Tensor, Tensor]:
    """Two [blocks, blocks] bool tensors: query-key blocks with some visible pairs, and with only visible pairs.

    A block that trunk and own segment fill only together counts as one with some.
    """
    token = torch.arange(len(seen.own_start))
    trunk_touched, trunk_filled = _blocks_of(seen.trunk_start.long(), seen.trunk_stop.long())
    own_touched, own_filled = _blocks_of(seen.own_start.long(), token + 1)
    full = trunk_filled + own_filled == BLOCK
    return (trunk_touched + own_touched > 0) & ~full, full


def _blocks_of(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Two [blocks, blocks] tensors: the number of queries whose key interval touches a block, and fills it."""
    touched = _count(start // BLOCK, torch.where(start < stop, -(-stop // BLOCK), start // BLOCK))
    first_whole = -(-start // BLOCK)
    return touched, _count(first_whole, torch.maximum(first_whole, stop // BLOCK))


def _count(first: Tensor, stop: Tensor) -> Tensor:
    """[blocks, blocks] how many queries of a block have a given key block in first .. stop - 1."""
    num_blocks = len(first) // BLOCK
    width = num_blocks + 1
    row = torch.arange(len(first)) // BLOCK * width
    steps = torch.zeros(num_blocks * width, dtype=torch.long)
    ones = torch.ones_like(first)
    steps.index_add_(0, row + first, ones).index_add_(0, row + stop, -ones)
    return steps.view(num_blocks, width).cumsum(1)[:, :num_blocks]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] int32 how many blocks are set, and [rows, columns] int32 their columns, followed by the other columns."""
    return blocks.sum(1, dtype=torch.int32), blocks.int().argsort(dim=1, descending=True, stable=True).int()
