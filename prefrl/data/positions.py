"""Rows of prepared datasets that are longer than the model can read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from prefrl.data.formats import AnyDataset
from prefrl.data.packing import is_packed
from prefrl.data.rows import list_lengths
from prefrl.distributed import is_main
from prefrl.errors import DataError

if TYPE_CHECKING:
    from prefrl.models.plans import PositionLimit
    from prefrl.options.length_bound import LengthBound

__all__ = ["check_positions"]

logger = logging.getLogger(__name__)


def check_positions(
    dataset: AnyDataset, limit: PositionLimit | None, bound: LengthBound, *, columns: Sequence[str]
) -> AnyDataset:
    """Refuse rows with more tokens than a table of positions, or warn if the model computes positions.

    If the options bound all rows within the limit, nothing is read.

    Args:
        dataset: Prepared; a stream is checked while it is read.
        limit: Of the model; None: not known.
        bound: Of the rows.
        columns: Those of ids; the dataset may lack some.
    Returns:
        The dataset; of a stream, one with the check.
    Raises:
        DataError: Names the first row that is too long for a table of positions.
    """
    is_bounded = limit is not None and bound.max_length is not None and bound.max_length + bound.sampled <= limit.count
    if limit is None or is_bounded:
        return dataset
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(_StreamedCheck(limit, bound, columns), with_indices=True)
    lengths = _longest({name: list_lengths(dataset, name) for name in columns if name in dataset.column_names})
    if is_packed(dataset, columns):
        lengths = np.array([max(sequences) for sequences in dataset["seq_lengths"]])
    too_long = np.flatnonzero(lengths + bound.sampled > limit.count)
    if len(too_long):
        first = int(too_long[0])
        count = f"{len(too_long)} of {len(dataset)} rows of the tokenized dataset are too long: "
        _report(f"{count}row {first}", int(lengths[first]), limit, bound)
    return dataset


@dataclass
class _StreamedCheck:
    """Checks a row of a stream; warns once."""

    limit: PositionLimit
    bound: LengthBound
    columns: Sequence[str]
    has_warned: bool = False

    def __call__(self, row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        length = max(row.get("seq_lengths") or (0,))
        length = length or int(_longest({name: len(row.get(name) or ()) for name in self.columns}))
        if length + self.bound.sampled > self.limit.count and not self.has_warned:
            self.has_warned = True
            _report(f"row {index} of the stream", length, self.limit, self.bound)
        return row


def _longest(lengths: Mapping[str, Any]) -> Any:
    """The tokens of prompt and longest completion, or of the longest sequence; for each row, or for one."""
    others = [lengths[name] for name in lengths if name != "prompt_ids"]
    return lengths.get("prompt_ids", 0) + reduce(np.maximum, others, 0)


def _report(row: str, length: int, limit: PositionLimit, bound: LengthBound) -> None:
    sampled = f" in the prompt, and {bound.sampled} are sampled" if bound.sampled else ""
    message = f"{row} has {length} tokens{sampled}, but max_position_embeddings={limit.count} in the model's config"
    remedy = f"Lower {bound.options}, so that rows have at most {limit.count} tokens"
    if limit.is_table:
        raise DataError(f"{message}: it has no embeddings for further positions. {remedy}.")
    if is_main():
        logger.warning(
            "%s: it was not trained on further positions, unless rope scaling covers them. %s.", message, remedy
        )
