"""Pack a dataset of the user's own: every column holds lists of the same lengths, such as ids and masks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, get_args

import datasets
import numpy as np
import pyarrow as pa

from prefrl.data.packing import best_fit_decreasing
from prefrl.errors import ConfigError, DataError

__all__ = ["ColumnPacking", "pack_dataset"]

ColumnPacking = Literal["bfd", "bfd_split", "wrapped"]
_Array = np.ndarray[Any, np.dtype[Any]]


def pack_dataset(
    dataset: Any, seq_length: int, strategy: ColumnPacking = "bfd", map_kwargs: dict[str, Any] | None = None
) -> Any:
    """Put several rows into one, up to `seq_length` items. The rows of one batch of `map` (1000) are packed together.

    - "bfd" keeps rows whole, cuts what is longer than `seq_length`, and leaves out empty rows
      (`best_fit_decreasing`).
    - "bfd_split" packs the pieces of longer rows as rows of their own, so nothing is lost.
    - "wrapped" lays all rows end to end and cuts them every `seq_length` items.

    Trainers do not need this: they pack by themselves (`packing=True`), and rows of this function lack what they need
    to know where a loss is.

    Args:
        dataset: A dataset, or its splits.
        seq_length: Items of a packed row.
        strategy: See above.
        map_kwargs: For the `map` of the dataset, such as `batch_size`.
    Returns:
        The same columns; and with "bfd" and "bfd_split" `seq_lengths`, the lengths of the rows inside each row.
    Raises:
        ConfigError: `seq_length` or `strategy` is not allowed.
        DataError: A column does not hold lists, or lists of other lengths than the first column.
    """
    if strategy not in get_args(ColumnPacking):
        raise ConfigError(f"strategy={strategy!r}: must be one of {', '.join(map(repr, get_args(ColumnPacking)))}")
    if seq_length < 1:
        raise ConfigError(f"seq_length={seq_length}: must be at least 1")
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = {name: pack_dataset(split, seq_length, strategy, map_kwargs) for name, split in dataset.items()}
        return type(dataset)(splits)
    pack = partial(_pack, seq_length=seq_length, strategy=strategy)
    packed = dataset.with_format("arrow").map(pack, batched=True, **(map_kwargs or {}))
    if isinstance(dataset, datasets.IterableDataset):
        return packed.with_format(None)
    about = {**dataset.format}
    added = [] if strategy == "wrapped" else ["seq_lengths"]
    return packed.with_format(
        about["type"],
        columns=None if about["columns"] is None else [*about["columns"], *added],
        output_all_columns=about["output_all_columns"],
        **about["format_kwargs"],
    )


def _pack(table: pa.Table, seq_length: int, strategy: ColumnPacking) -> pa.Table:
    columns = {name: pa.concat_arrays(table[name].chunks) for name in table.column_names}
    lengths = _lengths(columns)
    starts = np.cumsum(lengths) - lengths
    if strategy == "wrapped":
        count = int(lengths.sum())
        sizes = np.minimum(seq_length, count - np.arange(0, count, seq_length))
        return _table(columns, np.arange(count), sizes)
    if strategy == "bfd_split":
        starts, lengths = _pieces(starts, lengths, seq_length)
    is_kept = lengths > 0
    starts, lengths = starts[is_kept], np.minimum(lengths[is_kept], seq_length)
    bins = best_fit_decreasing(lengths.tolist(), seq_length)
    rows = np.array([row for numbers in bins for row in numbers], dtype=np.int64)
    items = np.concatenate([np.arange(0), *(np.arange(starts[row], starts[row] + lengths[row]) for row in rows)])
    sizes = np.array([lengths[numbers].sum() for numbers in bins], dtype=np.int64)
    counts = np.array([len(numbers) for numbers in bins], dtype=np.int64)
    inner = pa.ListArray.from_arrays(_offsets(counts, np.int32), pa.array(lengths[rows].astype(np.int32)))
    return _table(columns, items, sizes).append_column("seq_lengths", inner)


def _pieces(starts: _Array, lengths: _Array, seq_length: int) -> tuple[_Array, _Array]:
    """Start and length of each piece of up to `seq_length` items."""
    pieces = [
        (start + k * seq_length, min(seq_length, length - k * seq_length))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for k in range(math.ceil(length / seq_length))
    ]
    both = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _lengths(columns: dict[str, Any]) -> _Array:
    """The lengths of the lists, the same in every column."""
    found: dict[str, _Array] = {}
    for name, column in columns.items():
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise DataError(f"column {name!r} holds {column.type}: packing needs lists. Remove the column first")
        found[name] = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    first, *others = found
    for name in others:
        if not np.array_equal(found[name], found[first]):
            row = int(np.argmax(found[name] != found[first]))
            raise DataError(
                f"column {name!r} has {found[name][row]} items in row {row} of a batch, and {first!r} has "
                f"{found[first][row]}: packing needs lists of equal lengths. Remove one of the columns first"
            )
    return found[first]


def _table(columns: dict[str, Any], items: _Array, sizes: _Array) -> pa.Table:
    """Lists of these sizes, of the items with these numbers in the columns laid end to end."""
    arrays = {}
    for name, column in columns.items():
        offsets = _offsets(sizes, column.offsets.type.to_pandas_dtype())
        arrays[name] = type(column).from_arrays(offsets, column.flatten().take(pa.array(items)))
    return pa.table(arrays)


def _offsets(sizes: _Array, dtype: Any) -> Any:
    return pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(dtype))
