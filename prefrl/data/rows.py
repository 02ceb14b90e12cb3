"""Collect the rows that cannot be used, with their reasons; then raise an error or drop them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc

from prefrl.data.formats import AnyDataset
from prefrl.distributed import is_main
from prefrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["REMEDY", "EncodeRow", "InvalidRows", "drop_rows", "list_lengths", "map_rows"]

logger = logging.getLogger(__name__)

InvalidRows = Literal["error", "drop"]
EncodeRow = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_PROBLEM = "prefrl_problem"  # an extra column: why a row cannot be used, or None
_SHOWN = 3  # how many problems a message lists
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
    """Drop some rows, with a single warning.

    Args:
        rows: Map-style.
        problems: The reason for each row, by row number.
        remedy: What the user can do to keep them.
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
    """`2 of 9 rows cannot be used: row 0: ...; row 3: ...`."""
    shown = "; ".join(f"row {index}: {problems[index]}" for index in list(problems)[:_SHOWN])
    more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
    return f"{len(problems)} of {num_rows} rows cannot be used: {shown}{more}"
