"""Redistributes sampled rows over ranks before training, so that all ranks have about the same amount of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from prefrl import distributed
from prefrl.data.samplers import cost_of_segments, deal
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    import torch

__all__ = ["share_out"]

Batch = TypeVar("Batch", bound=TokenBatch)


def share_out(
    batch: Batch, *, hidden_size: int, rows_together: int | None = None, equal_counts: bool, device: torch.device
) -> Batch:
    """This rank's share of the rows of all ranks, dealt in groups by cost. All ranks must call it.

    Args:
        batch: This rank's rows, possibly none.
        hidden_size: The model's hidden size.
        rows_together: Deal larger groups in pieces of this many rows; None: in whole groups.
        equal_counts: Whether numbers of pieces differ by at most one between ranks; otherwise only costs are balanced.
        device: The device used to exchange rows.

    Returns:
        Pieces in descending order of cost; all fields of each row move with it.
    """
    own = _pieces(batch, rows_together)
    mine = [(len(rows), _cost(batch, rows, hidden_size)) for rows in own]
    everyone, start = distributed.gather_rows(mine)
    dealt = deal([cost for _, cost in everyone], distributed.world_size(), equal_counts=equal_counts)
    here = range(start, start + len(own))
    rows_to = [[row for i in sorted(part) if i in here for row in own[i - start]] for part in dealt]
    # Of hundreds of ranks, most get nothing from this one.
    leaving = [batch.select(rows_of) if rows_of else None for rows_of in rows_to]
    arrived = [part for part in distributed.exchange(leaving, device) if part is not None]
    batch = type(batch).concat(arrived or [batch.select([])])
    part, first, rows = dealt[distributed.rank()], 0, {}
    for i in sorted(part):  # as they arrive: those of each rank in order
        rows[i] = range(first, first + everyone[i][0])
        first = rows[i].stop
    return batch.select([row for i in part for row in rows[i]])


def _pieces(batch: TokenBatch, most_rows: int | None) -> list[list[int]]:
    """The rows of each group, in pieces of at most `most_rows`."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_index):
        groups.setdefault(group, []).append(row)
    size = most_rows or batch.num_rows
    return [rows[first : first + size] for rows in groups.values() for first in range(0, len(rows), size)]


def _cost(batch: TokenBatch, rows: list[int], hidden_size: int) -> float:
    """Forward cost of rows, each prompt once."""
    segments = [(float(before), float(length)) for before, length in batch.segments(rows)]
    return cost_of_segments(segments, hidden_size=hidden_size)
