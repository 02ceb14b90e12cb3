"""Redistributes sampled rows over ranks before training, so that all ranks have about the same amount of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from prefrl import distributed
from prefrl.data.dealing import cost_of_segments, deal
from prefrl.types import TokenBatch

if TYPE_CHECKING:
    import torch

__all__ = ["share_out"]

Batch = TypeVar("Batch", bound=TokenBatch)


def share_out(batch: Batch, *, hidden_size: int, equal_counts: bool, device: torch.device) -> Batch:
    """This rank's share of the rows of all ranks, dealt in whole groups by cost. All ranks must call it.

    Args:
        batch: This rank's rows, possibly none; no other rank has rows of their groups.
        hidden_size: The model's hidden size.
        equal_counts: Whether numbers of groups differ by at most one between ranks; otherwise only costs are balanced.
        device: The device used to exchange rows.

    Returns:
        Groups in descending order of cost; all fields of each row move with it.
    """
    own = _rows_of_groups(batch)
    mine = [(group, _cost(batch, rows, hidden_size)) for group, rows in own.items()]
    everyone, _ = distributed.gather_rows(mine)
    dealt = deal([cost for _, cost in everyone], distributed.world_size(), equal_counts=equal_counts)
    groups = [[everyone[item][0] for item in part] for part in dealt]
    leaving = [batch.select([row for group in part for row in own.get(group, ())]) for part in groups]
    batch = type(batch).concat(distributed.exchange(leaving, device))
    rows = _rows_of_groups(batch)
    return batch.select([row for group in groups[distributed.rank()] for row in rows[group]])


def _rows_of_groups(batch: TokenBatch) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_index):
        rows.setdefault(group, []).append(row)
    return rows


def _cost(batch: TokenBatch, rows: list[int], hidden_size: int) -> float:
    """Forward cost of rows, each prompt once."""
    segments = [(float(before), float(length)) for before, length in batch.segments(rows)]
    return cost_of_segments(segments, hidden_size=hidden_size)
