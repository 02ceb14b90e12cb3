"""Passes without gradient over a batch that is cut into pieces, so that its size does not decide the memory.

Ranks that have the weights of a model together run as many passes as each other: those with fewer pieces run an idle
row for the rest, and so does a rank without any row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from prefrl.distributed import missing_passes, release
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["in_pieces", "joined", "score_pieces"]

T = TypeVar("T")


def score_pieces(
    model: nn.Module, score: Callable[[TokenBatch], T], batch: TokenBatch, *, max_tokens: int | None
) -> tuple[list[TokenBatch], list[T]]:
    """The batch's rows in pieces of at most `max_tokens` forward tokens, and what `score` gives for each of them.

    All ranks must call it where they have the model's weights together.

    Args:
        model: Whose passes `score` runs, one in each call.
        score: Is called without gradient.
        batch: B rows, perhaps none.
        max_tokens: In one piece; a longer row is a piece of its own. None: one piece.

    Returns:
        For `joined`: pieces in any order, whose `group_index` is the number of each row in `batch`; an idle row if
        there are no others. And the results.
    """
    idle = TokenBatch.idle().to(batch.device)
    pieces = [batch.replace(group_index=tuple(range(batch.num_rows)))]
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
    """[N, ...] in the order of the batch, from what belongs to the tokens of each of its pieces."""
    rows: dict[int, Tensor] = {}
    for piece, part in zip(pieces, parts, strict=True):
        rows.update(zip(piece.group_index, torch.split(part, list(piece.response_lengths)), strict=True))
    return torch.cat([rows[row] for row in range(len(rows))])[: batch.num_tokens]


def in_pieces(
    model: nn.Module, score: Callable[[TokenBatch], Tensor], batch: TokenBatch, *, max_tokens: int | None
) -> Tensor:
    """What `score` gives for each token, without gradient.

    Args:
        model: See `score_pieces`.
        score: From a batch to [N, ...], aligned with its response tokens.
        batch: B rows, N response tokens.
        max_tokens: See `score_pieces`.

    Returns:
        [N, ...] in the batch's order.
    """
    return joined(batch, *score_pieces(model, score, batch, max_tokens=max_tokens))
