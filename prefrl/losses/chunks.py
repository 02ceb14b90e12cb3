"""Logits of a linear head, one chunk of tokens at a time, in buffers that all chunks share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """Logits = cap(scale * (x W^T + b)), with cap(z) = softcap * tanh(z / softcap)."""

    weight: Tensor  # [V, h]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


def score_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of everything after the product with the head: float32, or float64 for float64 input."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of the product with the head: autocast's if autocast is on, else the wider dtype of the two."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden.dtype, weight.dtype)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How logits are computed; see `Head` and `chunked_logprobs`."""

    scale: float
    softcap: float | None
    temperature: float
    chunk_size: int
    keep_bytes: int
    dtype: torch.dtype  # of scores, see `score_dtype`
    product_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of rows and their logits."""

    rows: slice
    hidden: Tensor  # [c, h] in the dtype of the product
    weight: Tensor  # [V, h] of the head, in the dtype of the product
    product: Tensor  # [c, V] in the dtype of the product; shares memory with `logits` if the dtypes are equal
    logits: Tensor  # [c, V] in the dtype of scores: cap(scale * z) / temperature; the consumer may overwrite it
    scratch: Tensor  # [c, V] in the dtype of scores; shares memory with `logits` unless `with_scratch`
    probs: Tensor | None  # [c, V] softmax(logits) if it was kept from forward; `logits` is then not filled


def chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: ChunkPlan,
    *,
    with_scratch: bool,
    kept: Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks in order, all in the same buffers, with the logits that `plan` describes."""
    weight, bias = weight.to(plan.product_dtype), None if bias is None else bias.to(plan.product_dtype)
    logits = hidden.new_empty(min(plan.chunk_size, hidden.shape[0]), weight.shape[0], dtype=plan.dtype)
    product = logits if plan.product_dtype == plan.dtype else torch.empty_like(logits, dtype=plan.product_dtype)
    scratch = torch.empty_like(logits) if with_scratch else logits
    for start in range(0, hidden.shape[0], plan.chunk_size):
        rows = slice(start, min(start + plan.chunk_size, hidden.shape[0]))
        n = rows.stop - start
        probs = None if kept is None else kept[rows]
        inputs = hidden[rows].to(plan.product_dtype)
        chunk = Chunk(rows, inputs, weight, product[:n], logits[:n], scratch[:n], probs)
        if probs is None:
            if bias is None:
                torch.mm(inputs, weight.t(), out=chunk.product)
            else:
                torch.addmm(bias, inputs, weight.t(), out=chunk.product)
            if product is not logits:
                chunk.logits.copy_(chunk.product)
            if plan.softcap is not None:
                chunk.logits.mul_(plan.scale / plan.softcap).tanh_().mul_(plan.softcap / plan.temperature)
            elif plan.scale != plan.temperature:
                chunk.logits.mul_(plan.scale / plan.temperature)
        yield chunk
