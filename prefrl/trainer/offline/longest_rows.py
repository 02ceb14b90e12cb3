"""The rows of a prepared dataset that need the most memory."""

from __future__ import annotations

import heapq
from itertools import cycle, islice
from typing import Any

import datasets

from prefrl.data.samplers import dealing_of
from prefrl.errors import ConfigError

__all__ = ["longest_rows"]


def longest_rows(dataset: Any, num_rows: int, *, hidden_size: int) -> list[dict[str, Any]]:
    """The rows whose forward pass costs the most, the costliest first; again from the first if there are too few.

    Args:
        dataset: Prepared.
        num_rows: Number of rows.
        hidden_size: Hidden size of the model.

    Raises:
        ConfigError: The dataset is a stream.
    """
    if isinstance(dataset, datasets.IterableDataset):
        raise ConfigError(
            "train_dataset is an IterableDataset, whose longest rows are not known before they are read: sizes cannot "
            "be 'auto'. Set numbers, or give a Dataset, such as Dataset.from_list(list(stream.take(n)))."
        )
    cost_of = dealing_of(dataset, hidden_size=hidden_size, equal_counts=True).cost_of
    longest = heapq.nlargest(num_rows, range(len(dataset)), key=cost_of)
    return [dataset[row] for row in islice(cycle(longest), num_rows)]
