"""Packing of any columns of lists, with results worked out by hand."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from prefrl.data.packing import pack_dataset
from prefrl.errors import ConfigError, DataError

ROWS = {"ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11], []], "odd": [[1, 0, 1, 0, 1], [0, 1], [0, 1, 0], [1], []]}


def packed(strategy: Any, seq_length: int = 4, **map_kwargs: Any) -> dict[str, Any]:
    columns = pack_dataset(datasets.Dataset.from_dict(ROWS), seq_length, strategy, map_kwargs).to_dict()
    assert columns.pop("odd") == [[item % 2 for item in row] for row in columns["ids"]]
    return dict(columns)


def test_rows_are_packed_whole_longest_first_and_cut() -> None:
    # 4 of the 5 fill a row; 3 open one; 2 find no room and open one; 1 goes beside the 3, whose row is fullest.
    assert packed("bfd") == {"ids": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], "seq_lengths": [[4], [3, 1], [2]]}


def test_pieces_of_long_rows_are_packed_as_rows_of_their_own() -> None:
    # The pieces 4 and 1, then 2, 3 and 1: of the two of length 1, the first in the dataset goes first.
    assert packed("bfd_split") == {
        "ids": [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]],
        "seq_lengths": [[4], [3, 1], [2, 1]],
    }


def test_wrapped_rows_are_cut_everywhere() -> None:
    assert packed("wrapped") == {"ids": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]}


def test_of_equally_full_rows_the_oldest_is_filled_first() -> None:
    rows = datasets.Dataset.from_dict({"ids": [[1, 1, 1], [2, 2, 2], [3], [4]]})
    assert pack_dataset(rows, 4)["ids"][:] == [[1, 1, 1, 3], [2, 2, 2, 4]]


def test_a_batch_of_map_is_packed_by_itself() -> None:
    assert packed("wrapped", batch_size=2)["ids"] == [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]]


def test_splits_streams_and_formats_are_kept() -> None:
    rows = datasets.Dataset.from_dict(ROWS)
    expected = pack_dataset(rows, 4).to_list()
    splits = pack_dataset(datasets.DatasetDict(train=rows), 4)
    assert splits["train"].to_list() == expected
    assert list(pack_dataset(rows.to_iterable_dataset(), 4)) == expected
    as_arrays = pack_dataset(rows.with_format("numpy", columns=["ids"]), 4)
    assert (as_arrays.format["type"], as_arrays.format["columns"]) == ("numpy", ["ids", "seq_lengths"])


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"ids": [1, 2]}, {}, DataError, "column 'ids' holds int64: packing needs lists"),
        (
            {"ids": [[1, 2]], "odd": [[1]]},
            {},
            DataError,
            "'odd' has 1 items in row 0 of a batch, and 'ids' has 2",
        ),
        ({"ids": [[1]]}, {"seq_length": 0}, ConfigError, "seq_length=0: must be at least 1"),
        ({"ids": [[1]]}, {"strategy": "ffd"}, ConfigError, "strategy='ffd': must be one of 'bfd', 'bfd_split'"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    columns: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_dataset(datasets.Dataset.from_dict(columns), **{"seq_length": 4, **options})
