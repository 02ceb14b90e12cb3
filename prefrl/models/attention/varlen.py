"""Flat attention as one call of a variable-length FlashAttention kernel.

Each segment is a sequence of queries whose keys are the tokens of its ancestors, followed by its own. The kernels
align queries with the last keys, as a segment with ancestors requires. Keys and values of a segment are copied for
each of its descendants, as in padded rows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefrl.errors import is_installed
from prefrl.models.attention.segments import Layout

# (query [T, H, D], key [S, KV, D], value [S, KV, D], sequences, scaling, window) -> [T, H, D]
Kernel = Callable[["Tensor", "Tensor", "Tensor", "Sequences", "float | None", "int | None"], "Tensor"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None
) -> Tensor:
    """Attention over a flat row in float16 or bfloat16, on CUDA; see `attention.flat_attention`.

    Returns:
        [1, T, H, D].
    """
    run = kernel()
    assert run is not None, "asked for where no kernel is installed"
    on_device = layout.once(("varlen", window, query.device), lambda: sequences(layout, window).to(query.device))
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if on_device.keys is not None:
        key, value = gather(key, on_device.keys), gather(value, on_device.keys)
    return run(query, key, value, on_device, scaling, window)[None]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Queries in flat order, cut into sequences, and the keys of each; its last query is aligned with its last key."""

    query_offsets: Tensor  # [sequences + 1] int32: where each starts among the T tokens, and T
    key_offsets: Tensor  # [sequences + 1] int32: where its keys start among the S keys, and S
    longest_query: int
    longest_key: int
    keys: Tensor | None  # [S] int64: the tokens that are keys, sequence by sequence; None: all tokens in flat order

    def to(self, device: torch.device) -> Sequences:
        """A copy with all tensors on `device`, sent without waiting."""
        return replace(
            self,
            query_offsets=self.query_offsets.to(device, non_blocking=True),
            key_offsets=self.key_offsets.to(device, non_blocking=True),
            keys=None if self.keys is None else self.keys.to(device, non_blocking=True),
        )


def sequences(layout: Layout, window: int | None) -> Sequences:
    """The layout in the form that these kernels need, on the host. Ancestors beyond the window are not copied."""
    query_lengths, key_lengths, keys = [], [], []
    paths: list[Tensor] = []  # the tokens of each segment after those of its ancestors
    for segment in layout.segments:
        own = torch.arange(segment.start, segment.stop)
        paths.append(torch.cat([paths[segment.ancestors[-1]], own]) if segment.ancestors else own)
        if segment.length == 0:
            continue
        reach = segment.position if window is None else min(segment.position, window - 1)
        query_lengths.append(segment.length)
        key_lengths.append(reach + segment.length)
        keys.append(paths[-1][segment.position - reach :])
    has_copies = sum(key_lengths) > sum(query_lengths)
    return Sequences(
        query_offsets=_offsets(query_lengths),
        key_offsets=_offsets(key_lengths),
        longest_query=max(query_lengths),
        longest_key=max(key_lengths),
        keys=torch.cat(keys) if has_copies else None,
    )


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.num_rows = len(rows)
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=torch.float32)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` with a gradient summed in float32: a token gets a term from each segment that sees it."""
    output: Tensor = _Gather.apply(rows, index)  # type: ignore[no-untyped-call]
    return output


@cache
def kernel() -> Kernel | None:
    """The first kernel that is installed: torch's own (from 2.11 on), then flash-attn's; None if there is none."""
    return _torch_kernel() or _flash_attn_kernel()


def _torch_kernel() -> Kernel | None:
    if not is_installed("torch.nn.attention.varlen"):
        return None
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    # Versions without this option support grouped heads by default.
    options = {"enable_gqa": True} if "enable_gqa" in parameters else {}

    def run(q: Tensor, k: Tensor, v: Tensor, held: Sequences, scaling: float | None, window: int | None) -> Tensor:
        output: Tensor = varlen_attn(
            *(q, k, v, held.query_offsets, held.key_offsets, held.longest_query, held.longest_key),
            scale=scaling,
            window_size=_reach(window),
            **options,
        )
        return output

    return run


def _flash_attn_kernel() -> Kernel | None:
    if not is_installed("flash_attn"):
        return None
    try:
        varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:  # built for another torch
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, held: Sequences, scaling: float | None, window: int | None) -> Tensor:
        output: Tensor = varlen_func(
            *(q, k, v, held.query_offsets, held.key_offsets, held.longest_query, held.longest_key),
            softmax_scale=scaling,
            causal=True,
            window_size=_reach(window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return output

    return run


def _reach(window: int | None) -> tuple[int, int]:
    """How many keys a query sees before and after its own position; -1 for all."""
    return (-1 if window is None else window - 1, 0)
