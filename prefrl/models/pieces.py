"""Passes without gradient over a batch that is cut into pieces, so that its size does not decide the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from prefrl.types import TokenBatch

__all__ = ["in_pieces", "joined", "pieces_of"]


def pieces_of(batch: TokenBatch, *, max_tokens: int | None) -> list[TokenBatch]:
    """The batch's rows in pieces of at most `max_tokens` forward tokens, in any order; for `joined`.

    Args:
        batch: B rows.
        max_tokens: In one piece; a longer row is a piece of its own. None: one piece.

    Returns:
        Pieces, whose `group_index` is the number of each row in `batch`.
    """
    numbered = batch.replace(group_index=tuple(range(batch.num_rows)))
    return [numbered] if max_tokens is None else numbered.split(max_tokens)


def joined(pieces: Sequence[TokenBatch], parts: Sequence[Tensor]) -> Tensor:
    """[N, ...] in the order of the batch that `pieces_of` cut, from what belongs to the tokens of each piece."""
    rows: dict[int, Tensor] = {}
    for piece, part in zip(pieces, parts, strict=True):
        rows.update(zip(piece.group_index, torch.split(part, list(piece.response_lengths)), strict=True))
    return torch.cat([rows[row] for row in range(len(rows))])


def in_pieces(score: Callable[[TokenBatch], Tensor], batch: TokenBatch, *, max_tokens: int | None) -> Tensor:
    """What `score` gives for each token, without gradient.

    Args:
        score: From a batch to [N, ...], aligned with its response tokens.
        batch: B rows, N response tokens.
        max_tokens: See `pieces_of`.

    Returns:
        [N, ...] in the batch's order.
    """
    pieces = pieces_of(batch, max_tokens=max_tokens)
    with torch.no_grad():
        return joined(pieces, [score(piece) for piece in pieces])
