"""No-grad passes over a batch that is split into pieces, so that memory does not depend on the batch size.

Ranks that share a model's partitioned weights must run equally many passes: ranks with fewer pieces run idle rows for
the remaining passes, and so do ranks without any row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from prefrl.distributed import missing_passes, release
from prefrl.types import IdleBatch, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["in_pieces", "joined", "score_pieces"]

T = TypeVar("T")


def score_pieces(
    model: nn.Module, score: Callable[[TokenBatch], T], batch: TokenBatch, *, max_tokens: int | None
) -> tuple[list[TokenBatch], list[T]]:
    """Split the batch into pieces of at most `max_tokens` forward tokens and call `score` on each piece.

    If the model's weights are partitioned over ranks, all ranks must call it.

    Args:
        model: The model of which each call of `score` runs one pass.
        score: Called without gradients.
        batch: B rows, possibly none.
        max_tokens: Limit per piece; a longer row becomes its own piece. None: one piece.

    Returns:
        Pieces, in any order, and their results, for `joined`. `group_index` of a piece holds the row numbers in
        `batch`. Without rows, the only piece is an idle row.
    """
    idle = IdleBatch.of_token().to(batch.device)
    pieces: list[TokenBatch] = [batch.replace(group_index=tuple(range(batch.num_rows)))]
    if not batch.num_rows:
        pieces = [idle]
    elif max_tokens is not None:
        pieces = pieces[0].split(max_tokens)
    num_missing = missing_passes(model, len(pieces), batch.device)
    with torch.no_grad():
        results = [score(piece) for piece in [*pieces, *[idle] * num_missing]]
    release(model)
    return pieces, results[: len(pieces)]


def joined(batch: TokenBatch, pieces: Sequence[TokenBatch], parts: Sequence[Tensor]) -> Tensor:
    """[N, ...] in the order of the batch, from per-token results of its pieces."""
    rows: dict[int, Tensor] = {}
    for piece, part in zip(pieces, parts, strict=True):
        rows.update(zip(piece.group_index, torch.split(part, list(piece.row_lengths)), strict=True))
    return torch.cat([rows[row] for row in range(len(rows))])[: batch.num_tokens]


def in_pieces(
    model: nn.Module, score: Callable[[TokenBatch], Tensor], batch: TokenBatch, *, max_tokens: int | None
) -> Tensor:
    """The per-token results of `score` for the whole batch, without gradients.

    Args:
        model: See `score_pieces`.
        score: Maps a batch to [N, ...], aligned with its response tokens.
        batch: B rows, N response tokens.
        max_tokens: See `score_pieces`.

    Returns:
        [N, ...] in the batch's order.
    """
    return joined(batch, *score_pieces(model, score, batch, max_tokens=max_tokens))
