"""FlashAttention for sequences of different lengths, in plain torch: it checks and computes what the CUDA kernel does.

Nothing is known here of layouts: which token sees which follows from the offsets, the window, and the rule that the
last query of a sequence is aligned with its last key. What the CUDA kernel does not notice, since its host does not
read the offsets, is checked, too: offsets that do not cover all tokens, and sequences longer than the host said.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Flash:
    """The kernel, and the dtypes that it takes: tests may let it take float32, to compare more exactly."""

    dtypes: Sequence[torch.dtype] = HALF
    num_calls: int = 0  # of the forward

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        longest_query: int,
        longest_key: int,
        *,
        scale: float | None,
        window: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """Output like the query [T, H, D], and the logarithms of the softmax's denominators [H, T]."""
        self.num_calls += 1
        self._check_tensors(query, key, value)
        _check_offsets(query_offsets, len(query), longest_query, query.device)
        _check_offsets(key_offsets, len(key), longest_key, query.device)
        assert query_offsets.shape == key_offsets.shape, "cu_seqlens must have an entry for each sequence"
        output = torch.empty_like(query)
        logsumexp = query.new_empty(query.size(1), len(query), dtype=torch.float32)
        for rows, columns in _sequences(query_offsets, key_offsets):
            scores, v = _scores(query[rows], key[columns], scale, window), _per_head(value[columns], query)
            logsumexp[:, rows] = scores.logsumexp(-1)
            weights = (scores - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num()  # a query may see nothing
            output[rows] = (weights @ v).transpose(0, 1).to(output.dtype)
        return output, logsumexp

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        longest_query: int,
        longest_key: int,
        *,
        scale: float | None,
        window: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients like query, key and value."""
        self._check_tensors(query, key, value)
        _check_offsets(query_offsets, len(query), longest_query, query.device)
        _check_offsets(key_offsets, len(key), longest_key, query.device)
        assert grad_output.dtype == query.dtype, "query and dout must have the same dtype"
        assert grad_output.shape == output.shape == query.shape
        groups, factor = query.size(1) // key.size(1), query.size(2) ** -0.5 if scale is None else scale
        grads = tuple(torch.zeros_like(x) for x in (query, key, value))
        for rows, columns in _sequences(query_offsets, key_offsets):
            q, d_out, out = (x[rows].float().transpose(0, 1) for x in (query, grad_output, output))
            k, v = (_per_head(x[columns], query) for x in (key, value))
            scores = _scores(query[rows], key[columns], scale, window)
            weights = (scores - logsumexp[:, rows, None]).exp().nan_to_num()
            d_scores = weights * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * factor
            of_heads = (d_scores @ k, d_scores.mT @ q, weights.mT @ d_out)
            for index, grad, of_head in zip((rows, columns, columns), grads, of_heads, strict=True):
                of_group = of_head.unflatten(0, (-1, 1 if grad is grads[0] else groups)).sum(1)
                grad[index] = of_group.transpose(0, 1).to(grad.dtype)
        return grads

    def _check_tensors(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        tokens, heads, size = query.shape
        keys, key_heads, _ = key.shape
        assert query.dtype in self.dtypes, "FlashAttention only support fp16 and bf16 data type"
        assert key.dtype == value.dtype == query.dtype, "query, key and value must have the same dtype"
        assert key.device == value.device == query.device, "Expected tensors on one device"
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert size <= 256, "FlashAttention forward only supports head dimension at most 256"
        assert size % 8 == 0, "head_size must be a multiple of 8"
        assert heads % key_heads == 0, "Number of heads in key/value must divide number of heads in query"
        assert key.shape == value.shape == (keys, key_heads, size), "key and value must have the same shape"
        assert tokens > 0


def _check_offsets(offsets: Tensor, total: int, longest: int, device: torch.device) -> None:
    assert offsets.dtype == torch.int32, "cu_seqlens must have dtype int32"
    assert offsets.dim() == 1
    assert offsets.is_contiguous(), "cu_seqlens must be contiguous"
    assert offsets.device == device, "cu_seqlens must be on the device of the tokens"
    assert type(longest) is int, "max_seqlen must be a number of the host"
    starts = offsets.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    assert lengths, "batch size must be positive"
    assert starts[0] == 0, "cu_seqlens must start with 0"
    assert min(lengths) >= 0, "cu_seqlens must not decrease"
    assert starts[-1] == total, "cu_seqlens must end with the number of tokens: the others' outputs are never written"
    assert max(lengths) <= longest, "a sequence is longer than max_seqlen: its end is never computed"


def _sequences(query_offsets: Tensor, key_offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    for rows, columns in zip(pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True):
        yield slice(*rows), slice(*columns)


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    """[H, S, D] in float32: a key's head for each of the query's."""
    return tensor.float().transpose(0, 1).repeat_interleave(query.size(1) // tensor.size(1), 0)


def _scores(query: Tensor, key: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """[H, queries, keys] in float32, minus infinity where a query does not look."""
    factor = 1 / math.sqrt(query.size(2)) if scale is None else scale
    ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None] - (len(key) - len(query))
    before, after = window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead < -before) if before >= 0 else hidden
    hidden |= (ahead > after) if after >= 0 else hidden
    scores = query.float().transpose(0, 1) @ _per_head(key, query).mT * factor
    return scores.masked_fill(hidden, float("-inf"))


@contextmanager
def as_torchs_kernel(flash: Flash) -> Iterator[None]:
    """The operators behind `torch.nn.attention.varlen` run on the CPU, where torch has no kernel for them."""

    def forward(*arguments: Any, window_size_left: int, window_size_right: int, **options: Any) -> Any:
        *tensors_and_lengths, dropout, is_causal, wants_mask = arguments
        scale = options.pop("scale", None)
        assert (dropout, wants_mask, set(options.values()) - {None}) == (0.0, False, set())
        window = (window_size_left, 0 if is_causal else window_size_right)
        output, logsumexp = flash.forward(*tensors_and_lengths, scale=scale, window=window)
        unused = torch.empty(0)
        return output, logsumexp, torch.zeros(2, dtype=torch.uint64), unused, unused

    def backward(*arguments: Any, window_size_left: int, window_size_right: int, scale: float | None = None) -> Any:
        *tensors_and_lengths, dropout, is_causal, _, _ = arguments
        assert dropout == 0.0
        window = (window_size_left, 0 if is_causal else window_size_right)
        return flash.backward(*tensors_and_lengths, scale=scale, window=window)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def as_package(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `flash_attn` whose function for sequences of different lengths runs on the CPU."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            *tensors_and_lengths, scale, window = arguments
            output, logsumexp = flash.forward(*tensors_and_lengths, scale=scale, window=window)
            query, key, value, *offsets_and_lengths = tensors_and_lengths
            ctx.save_for_backward(query, key, value, output, logsumexp)
            ctx.others = offsets_and_lengths, scale, window
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            offsets_and_lengths, scale, window = ctx.others
            grads = flash.backward(grad, *ctx.saved_tensors, *offsets_and_lengths, scale=scale, window=window)
            return *grads, None, None, None, None, None, None

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        assert dropout_p == 0.0
        window = (window_size[0], 0 if causal else window_size[1])
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        output: Tensor = Function.apply(q, k, v, *lengths, softmax_scale, window)  # type: ignore[no-untyped-call]
        return output

    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
