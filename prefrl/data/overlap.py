"""Rows that are in the training dataset and in an evaluation dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from prefrl.data.packing import is_packed
from prefrl.distributed import is_main

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["num_duplicates", "warn_of_shared_rows"]

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 10_000
# Depends on other rows of its dataset.
_NOT_OF_THE_ROW = "KL_completion_ids"


def warn_of_shared_rows(training: Any, evaluation: Any, *, columns: Sequence[str]) -> None:
    """Warn on the main process if rows of an evaluation dataset have the tokens of a row that is trained on.

    Of packed rows, the sequences are compared. Streams are not read.

    Args:
        training: A prepared dataset or None.
        evaluation: Prepared: one dataset, several by name, or None.
        columns: Those of ids; datasets may lack some.
    """
    parts = evaluation if isinstance(evaluation, Mapping) else {None: evaluation}
    parts = {name: part for name, part in parts.items() if isinstance(part, datasets.Dataset)}
    if not (is_main() and parts and isinstance(training, datasets.Dataset)):
        return
    evaluated = {name: list(_sequences(part, columns)) for name, part in parts.items()}
    wanted = {tokens for sequences in evaluated.values() for _, tokens in sequences}
    trained = {tokens for _, tokens in _sequences(training, columns) if tokens in wanted}
    for name, sequences in evaluated.items():
        shared = [row for row, tokens in sequences if tokens in trained]
        if shared:
            logger.warning(
                "%d of %d rows of eval_dataset%s are also in train_dataset; the first is row %d of the tokenized "
                "dataset. Their metrics do not show how the model does on new data. Remove them from one of the two.",
                len(shared),
                len(sequences),
                "" if name is None else f"[{name!r}]",
                shared[0],
            )


def num_duplicates(dataset: datasets.Dataset, *, columns: Sequence[str]) -> int:
    """How many rows of a prepared dataset have the tokens and images of an earlier one.

    Args:
        dataset: Prepared.
        columns: Those of ids; the dataset may lack some.
    """
    hashes = [tokens for _, tokens in _sequences(dataset, columns)]
    return len(hashes) - len(set(hashes))


def _sequences(dataset: datasets.Dataset, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Row number and a hash of the tokens and images of each row, or of each sequence of a packed row."""
    names = [name for name in columns if name in dataset.column_names and name != _NOT_OF_THE_ROW]
    has_sequences, has_images = is_packed(dataset, columns), "images" in dataset.column_names
    if has_sequences and has_images:
        return  # images are not compared by sequence
    others = [*(["seq_lengths"] if has_sequences else []), *(["images"] if has_images else [])]
    selected = dataset.select_columns([*names, *others]).with_format("arrow")
    first = 0
    for table in selected.iter(_ROWS_AT_ONCE):
        tokens = zip(*(_lists(table[name]) for name in names), strict=True)
        if has_images:
            images = ([one["bytes"] or one["path"] for one in row or ()] for row in table["images"].to_pylist())
            for row, (lists, own) in enumerate(zip(tokens, images, strict=True), first):
                yield row, hash((*(ids.tobytes() for ids in lists), *own))
        elif has_sequences:
            for row, ((packed,), lengths) in enumerate(zip(tokens, _lists(table["seq_lengths"]), strict=True), first):
                yield from ((row, hash((ids.tobytes(),))) for ids in np.split(packed, np.cumsum(lengths)[:-1]))
        else:
            yield from ((row, hash(tuple(ids.tobytes() for ids in lists))) for row, lists in enumerate(tokens, first))
        first += len(table)


def _lists(column: pa.ChunkedArray) -> Iterator[NDArray[np.int32]]:
    """The lists of a column, without copies of their items."""
    lists = column.combine_chunks()
    offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
    return (items[start:stop] for start, stop in pairwise(offsets))
