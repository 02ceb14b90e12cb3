"""Pack tokenized rows into rows of up to `max_length` tokens, or the lists of any dataset; always in the same way.

A map-style dataset of a trainer is packed as a whole, a stream in windows. Rows that cannot be used are collected with
their reasons; then they raise an error or are dropped.
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from prefrl.data.formats import AnyDataset
from prefrl.distributed import is_main
from prefrl.errors import ConfigError, DataError

PackingStrategy = Literal["bfd", "bfd_split", "wrapped"]
_Array = np.ndarray[Any, np.dtype[Any]]

_WINDOW = 1000  # rows of a stream that are packed together


def is_packed(dataset: datasets.Dataset, columns: Sequence[str]) -> bool:
    """Whether the rows of a prepared dataset are packed, given its columns of ids; others belong to the user."""
    return "seq_lengths" in dataset.column_names and "input_ids" in columns


def pack_bfd(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The bins of `best_fit_decreasing`, each ascending, ordered by their first number."""
    return sorted((sorted(numbers) for numbers in best_fit_decreasing(lengths, capacity)), key=lambda bin_: bin_[0])


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sequence, longest first, goes into the fullest bin that has room for it; of equal bins, into the oldest.

    The result has at most 11/9 OPT + 6/9 bins.
    The time is O(n log n), with a bisection over the distinct amounts of free room, of which there are at most
    `capacity`.

    Returns:
        Bins of sequence numbers, in the order in which they were opened and filled.
    Raises:
        DataError: A sequence is empty or longer than the capacity.
    Source: Johnson 1973, Near-optimal bin packing algorithms (thesis, MIT); bound: Dosa 2007.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise DataError(f"sequence {index} has {length} tokens: packing needs 1 to {capacity}. Truncate it first")
    bins: list[list[int]] = []
    with_room: dict[int, deque[int]] = {}  # room -> numbers of the bins that came to have exactly this room, in order
    rooms: list[int] = []  # the keys of with_room, ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        position = bisect_left(rooms, length)
        if position == len(rooms):
            target, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[position]
            target = with_room[room].popleft()
            if not with_room[room]:
                del with_room[room], rooms[position]
        bins[target].append(index)
        room -= length
        if room not in with_room:
            with_room[room] = deque()
            insort(rooms, room)
        with_room[room].append(target)
    return bins


def pack_prepared(dataset: AnyDataset, *, max_length: int, strategy: PackingStrategy = "bfd") -> AnyDataset:
    """Put several tokenized rows into one. In a stream, each window of 1000 rows is packed separately.

    - "bfd" keeps every row whole (`pack_bfd`). Attention stays within each original row.
    - "bfd_split" cuts rows longer than `max_length` into pieces, which are packed like rows. The first token of a
      piece has no loss, because nothing precedes it. Pieces without any loss are dropped.
    - "wrapped" lays all rows end to end and cuts them every `max_length` tokens. A piece is one sequence, in which a
      document attends to the ones before it. The first token of a document or a piece has no loss. Pieces without any
      loss are dropped.

    Args:
        dataset: `input_ids` and `trainable`, as `prepare_sft_dataset` gives them.
        max_length: Tokens of a packed row.
        strategy: See above.
    Returns:
        Columns `input_ids`, `trainable` and `seq_lengths: list[int]`, the lengths of the sequences of a row.
    Raises:
        ConfigError: `max_length` below 2: no token would have a predecessor.
        DataError: A row is longer than `max_length` ("bfd"), or no piece has a loss ("wrapped", not for streams).
    """
    if max_length < 2:
        raise ConfigError(f"max_length={max_length}: packing needs at least 2 tokens per row")
    if isinstance(dataset, datasets.IterableDataset):
        options = {"max_length": max_length, "strategy": strategy}
        return dataset.map(_pack_window, batched=True, batch_size=_WINDOW, fn_kwargs=options)
    if "images" in dataset.column_names and strategy != "bfd":
        raise ConfigError(
            f"packing_strategy={strategy!r} may cut sequences anywhere, even inside images. Use packing_strategy='bfd'"
        )
    packed = _pack(dataset.flatten_indices().with_format("arrow")[:], max_length, strategy)
    if packed.num_rows == 0:
        raise DataError(
            f"packing {strategy!r} at max_length={max_length} leaves no token to train on: nothing predicts the first "
            "token of a piece, and no piece has a second one. Raise max_length, or use packing_strategy='bfd'"
        )
    if "images" not in packed.column_names:
        return datasets.Dataset(packed)
    plain = datasets.Dataset(packed.drop_columns(["images"])).features
    features = datasets.Features({**plain, "images": datasets.List(datasets.List(datasets.Image()))})
    return datasets.Dataset(packed, info=datasets.DatasetInfo(features=features))


def _pack_window(batch: dict[str, list[Any]], max_length: int, strategy: PackingStrategy) -> dict[str, list[Any]]:
    if "images" in batch:
        raise ConfigError("packing=True with a stream of rows that may have images: use a map-style dataset")
    columns = {name: pa.chunked_array([batch[name]]) for name in ("input_ids", "trainable")}
    packed: dict[str, list[Any]] = _pack(pa.table(columns), max_length, strategy).to_pydict()
    return packed


def _pack(table: pa.Table, max_length: int, strategy: PackingStrategy) -> pa.Table:
    token_ids, trainable = _flat(table["input_ids"]), _flat(table["trainable"])
    lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in table["input_ids"].chunks])
    if strategy == "wrapped":
        return _wrapped_table(token_ids, trainable, lengths, max_length)
    if strategy == "bfd_split":
        token_ids, trainable, lengths = _split(token_ids, trainable, lengths, max_length)
    bins = pack_bfd(lengths.tolist(), max_length)
    packed = _bfd_table(token_ids, trainable, lengths, bins)
    if "images" not in table.column_names:
        return packed
    images = table["images"].combine_chunks().take(pa.array([index for numbers in bins for index in numbers]))
    offsets = pa.array(np.cumsum([0, *(len(numbers) for numbers in bins)]).astype(np.int32))
    return packed.append_column("images", pa.ListArray.from_arrays(offsets, images))


def _bfd_table(token_ids: _Array, trainable: _Array, lengths: _Array, bins: Sequence[Sequence[int]]) -> pa.Table:
    order = np.array([index for numbers in bins for index in numbers], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    source = np.concatenate([np.arange(0), *(np.arange(starts[i], starts[i] + lengths[i]) for i in order)])
    counts = np.array([len(numbers) for numbers in bins], dtype=np.int64)
    totals = np.add.reduceat(lengths[order], np.cumsum(counts) - counts)
    return _table(token_ids[source], trainable[source], totals, lengths[order], counts)


def _split(token_ids: _Array, trainable: _Array, lengths: _Array, max_length: int) -> tuple[_Array, _Array, _Array]:
    """The pieces of up to `max_length` tokens that have a loss."""
    starts, lengths = _pieces(np.cumsum(lengths) - lengths, lengths, max_length)
    trainable = trainable.copy()
    trainable[starts] = False
    has_loss = np.logical_or.reduceat(trainable, starts)
    kept = np.repeat(has_loss, lengths)
    return token_ids[kept], trainable[kept], lengths[has_loss]


def _wrapped_table(token_ids: _Array, trainable: _Array, lengths: _Array, max_length: int) -> pa.Table:
    starts = np.arange(0, len(token_ids), max_length)
    trainable = trainable.copy()
    trainable[starts] = False
    has_loss = np.logical_or.reduceat(trainable, starts)
    pieces = np.diff(np.append(starts, len(token_ids)))
    kept = np.repeat(has_loss, pieces)
    totals = pieces[has_loss]
    return _table(token_ids[kept], trainable[kept], totals, totals, np.ones_like(totals))


def _table(token_ids: _Array, trainable: _Array, totals: _Array, seq_lengths: _Array, counts: _Array) -> pa.Table:
    return pa.table(
        {
            "input_ids": _list_column(token_ids, totals),
            "trainable": _list_column(trainable, totals),
            "seq_lengths": _list_column(seq_lengths.astype(np.int32), counts),
        }
    )


def _flat(column: pa.ChunkedArray) -> _Array:
    return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])


def _list_column(values: _Array, counts: _Array) -> pa.ChunkedArray:
    """A column of lists, in chunks, because Arrow counts the values of a chunk with 32 bits."""
    rows_per_chunk = 10_000
    borders = np.concatenate([[0], np.cumsum(counts)])
    chunks = []
    for row in range(0, max(len(counts), 1), rows_per_chunk):  # an empty column still needs one chunk, for its type
        part = borders[row : row + rows_per_chunk + 1]
        offsets = pa.array((part - part[0]).astype(np.int32))
        chunks.append(pa.ListArray.from_arrays(offsets, pa.array(values[part[0] : part[-1]])))
    return pa.chunked_array(chunks)


ColumnPacking = Literal["bfd", "bfd_split", "wrapped"]


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
        seq_length: Maximum number of items in a packed row.
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
    pack = partial(_pack_columns, seq_length=seq_length, strategy=strategy)
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


def _pack_columns(table: pa.Table, seq_length: int, strategy: ColumnPacking) -> pa.Table:
    columns = {name: pa.concat_arrays(table[name].chunks) for name in table.column_names}
    lengths = _lengths(columns)
    starts = np.cumsum(lengths) - lengths
    if strategy == "wrapped":
        count = int(lengths.sum())
        sizes = np.minimum(seq_length, count - np.arange(0, count, seq_length))
        return _table_of_lists(columns, np.arange(count), sizes)
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
    return _table_of_lists(columns, items, sizes).append_column("seq_lengths", inner)


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


def _table_of_lists(columns: dict[str, Any], items: _Array, sizes: _Array) -> pa.Table:
    """Lists of these sizes, of the items with these numbers in the columns laid end to end."""
    arrays = {}
    for name, column in columns.items():
        offsets = _offsets(sizes, column.offsets.type.to_pandas_dtype())
        arrays[name] = type(column).from_arrays(offsets, column.flatten().take(pa.array(items)))
    return pa.table(arrays)


def _offsets(sizes: _Array, dtype: Any) -> Any:
    return pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(dtype))


logger = logging.getLogger(__name__)

InvalidRows = Literal["error", "drop"]
EncodeRow = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_PROBLEM = "prefrl_problem"  # an extra column: why a row cannot be used, or None
_SHOWN = 3  # how many problems a message lists
_SAME = 2  # how many rows with the same problem it names after the first
_NUMBER = re.compile(r"\d+")
REMEDY = "Correct them, or set invalid_rows='drop' to train without them"


def map_rows(
    dataset: AnyDataset,
    encode_row: EncodeRow,
    features: Mapping[str, Any],
    *,
    invalid_rows: InvalidRows,
    num_proc: int | None,
    desc: str,
    remedy: str = REMEDY,
) -> AnyDataset:
    """Encode each row. Rows for which `encode_row` raises a DataError are collected, then reported or dropped.

    A stream is encoded while it is read. Its unusable rows are found one by one, and their total number is unknown.

    Args:
        dataset: Not empty.
        encode_row: Returns the values of `features`, or raises.
        features: The output columns with their types; a stream does not need the types. Other columns of the dataset
            are dropped.
        invalid_rows: "error": raise one error for all unusable rows of a dataset, or at the first one of a stream.
            "drop": drop them with a warning.
        num_proc: Number of processes that encode.
        desc: Text of the progress bar.
        remedy: What the user can do about unusable rows, if they are an error.
    Raises:
        ConfigError: `num_proc` for a stream.
        DataError: Rows cannot be used and are not to be dropped, or no row can be used.
    """
    names = tuple(features)
    if isinstance(dataset, datasets.IterableDataset):
        _check_no_processes(num_proc)
        encoded = dataset.map(_StreamedRow(encode_row, names, invalid_rows, remedy), with_indices=True)
        return encoded.filter(_is_usable).select_columns(list(names))
    rows = dataset.map(
        _CheckedRow(encode_row, names),
        remove_columns=[name for name in dataset.column_names if name not in features],
        features=datasets.Features({**features, _PROBLEM: datasets.Value("string")}),
        num_proc=num_proc,
        desc=desc,
    )
    problems = {index: problem for index, problem in enumerate(rows[_PROBLEM][:]) if problem is not None}
    if problems and invalid_rows == "error":
        raise DataError(f"{_list_of(problems, len(rows))}. {remedy}")
    return drop_rows(rows.remove_columns(_PROBLEM), problems, remedy="Correct them to train on them")


def drop_rows(rows: datasets.Dataset, problems: Mapping[int, str], *, remedy: str) -> datasets.Dataset:
    """Drop the rows that have problems, by row number, with a single warning that says what keeps them.

    Raises:
        DataError: No row is left.
    """
    if not problems:
        return rows
    if len(problems) == len(rows):
        raise DataError(f"{_list_of(problems, len(rows))}. {remedy}")
    if is_main():  # all processes read the same rows
        logger.warning("%s. They are dropped. %s", _list_of(problems, len(rows)), remedy)
    return rows.select([index for index in range(len(rows)) if index not in problems])


@dataclass(frozen=True)
class _CheckedRow:
    """Encodes a row of a map-style dataset, or writes into a column why it cannot be used."""

    encode_row: EncodeRow
    names: Sequence[str]

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {**self.encode_row(row), _PROBLEM: None}
        except DataError as error:
            return {**dict.fromkeys(self.names), _PROBLEM: str(error)}


@dataclass
class _StreamedRow:
    """Encodes a row of a stream. If it cannot be used, raises an error or logs the reason."""

    encode_row: EncodeRow
    names: Sequence[str]
    invalid_rows: InvalidRows
    remedy: str
    num_dropped: int = 0

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            return {**self.encode_row(row), _PROBLEM: None}
        except DataError as error:
            if self.invalid_rows == "error":
                raise DataError(f"row {index} of the stream cannot be used: {error}. {self.remedy}") from error
            self._log(index, error)
            return {**dict.fromkeys(self.names), _PROBLEM: str(error)}

    def _log(self, index: int, error: DataError) -> None:
        self.num_dropped += 1
        if self.num_dropped > _SHOWN or not is_main():
            return
        silence = ". Further rows are dropped without a message" if self.num_dropped == _SHOWN else ""
        logger.warning("row %d of the stream cannot be used and is dropped: %s%s", index, error, silence)


def _is_usable(row: Mapping[str, Any]) -> bool:
    return row[_PROBLEM] is None


def _check_no_processes(num_proc: int | None) -> None:
    if num_proc is not None:
        raise ConfigError(
            f"dataset_num_proc={num_proc}: a streaming dataset is tokenized while it is read, not beforehand. "
            "Set dataset_num_proc=None"
        )


def list_lengths(dataset: datasets.Dataset, column: str) -> NDArray[np.int64]:
    """[rows] lengths of the lists in a column; 0 for None."""
    tables = dataset.select_columns([column]).with_format("arrow").iter(10_000)
    return np.concatenate(
        [pc.list_value_length(table[column]).fill_null(0).to_numpy().astype(np.int64) for table in tables]
    )


def _list_of(problems: Mapping[int, str], num_rows: int) -> str:
    """`5 of 9 rows cannot be used: row 0: ...; the same in rows 3, 4 and 1 more; row 7: ...`.

    Problems that differ in their numbers alone are the same.
    """
    kinds: dict[str, list[int]] = {}
    for index, problem in problems.items():
        kinds.setdefault(_NUMBER.sub("0", problem), []).append(index)
    shown = list(kinds.values())[:_SHOWN]
    texts = [f"row {first}: {problems[first]}{_same_in(others)}" for first, *others in shown]
    left = len(problems) - sum(map(len, shown))
    more = f" (and {left} more)" if left else ""
    return f"{len(problems)} of {num_rows} rows cannot be used: {'; '.join(texts)}{more}"


def _same_in(rows: Sequence[int]) -> str:
    """`; the same in rows 3, 4 and 1 more`."""
    if not rows:
        return ""
    listed = ", ".join(map(str, rows[:_SAME]))
    more = f" and {len(rows) - _SAME} more" if len(rows) > _SAME else ""
    return f"; the same in row{'s' if len(rows) > 1 else ''} {listed}{more}"
