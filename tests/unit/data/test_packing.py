"""Packing of rows, and of any columns of lists, with results worked out by hand."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from prefrl.data.packing import pack_bfd, pack_dataset, pack_prepared
from prefrl.errors import ConfigError, DataError

WINDOWS = (range(1000), range(1000, 1500))


def tokenized(*lengths):
    """Rows of ids that count on over the whole dataset, with a loss on all but each row's first token."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return datasets.Dataset.from_list(
        [
            {"input_ids": list(range(start, start + n)), "trainable": [False] + [True] * (n - 1)}
            for start, n in zip(starts, lengths, strict=True)
        ]
    )


def test_each_sequence_goes_to_the_fullest_bin_with_room():
    # By length: 6 opens a bin, 5 another; 4 fills the first (room 4 against 5), 3 and 2 fill the second.
    assert pack_bfd([2, 6, 3, 5, 4], 10) == [[0, 2, 3], [1, 4]]


def test_equal_lengths_are_taken_in_order():
    assert pack_bfd([5, 5, 5], 10) == [[0, 1], [2]]


@pytest.mark.parametrize(("lengths", "part"), [([3, 11], "sequence 1 has 11"), ([0], "sequence 0 has 0")])
def test_sequence_that_fits_no_bin_is_refused(lengths, part):
    with pytest.raises(DataError, match=part):
        pack_bfd(lengths, 10)


def test_bfd_rows_hold_whole_sequences_and_their_lengths():
    packed = pack_prepared(tokenized(2, 3, 4), max_length=6)
    assert packed[:] == {
        "input_ids": [[0, 1, 5, 6, 7, 8], [2, 3, 4]],
        "trainable": [[False, True, False, True, True, True], [False, True, True]],
        "seq_lengths": [[2, 4], [3]],
    }


def test_bfd_reads_the_rows_that_a_selection_left():
    packed = pack_prepared(tokenized(2, 3, 4).select([2, 0]), max_length=6)
    assert packed["input_ids"][:] == [[5, 6, 7, 8, 0, 1]]


def test_wrapped_cuts_everywhere_and_never_trains_on_a_start():
    packed = pack_prepared(tokenized(2, 3, 4), max_length=4, strategy="wrapped")
    assert packed[:] == {
        # The ninth token stands alone in its piece, so nothing predicts it.
        "input_ids": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "trainable": [[False, True, False, True], [False, False, True, True]],
        "seq_lengths": [[4], [4]],
    }


def test_pieces_of_long_rows_are_packed_and_never_trained_on_at_their_starts():
    packed = pack_prepared(tokenized(2, 3, 4), max_length=3, strategy="bfd_split")
    assert packed[:] == {
        # The fourth token of the last row stands alone in its piece, so nothing predicts it.
        "input_ids": [[0, 1], [2, 3, 4], [5, 6, 7]],
        "trainable": [[False, True], [False, True, True], [False, True, True]],
        "seq_lengths": [[2], [3], [3]],
    }


def test_wrapped_without_any_loss_left_is_refused():
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "trainable": [False, False, True]}])
    with pytest.raises(DataError, match="leaves no token to train on"):
        pack_prepared(rows, max_length=2, strategy="wrapped")


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_stream_is_packed_in_windows_of_1000_rows(strategy):
    rows = tokenized(*[2, 3, 4] * 500)
    windows = [pack_prepared(rows.select(part), max_length=9, strategy=strategy) for part in WINDOWS]
    packed = list(pack_prepared(rows.to_iterable_dataset(), max_length=9, strategy=strategy))
    assert packed == [row for window in windows for row in window]


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_window_of_a_stream_without_any_loss_is_left_out(strategy):
    dead = {"input_ids": [1, 2, 3, 4], "trainable": [False, False, True, False]}
    stream = datasets.IterableDataset.from_generator(lambda: iter([dead] * 1000 + [*tokenized(2)]))
    assert list(pack_prepared(stream, max_length=2, strategy=strategy)) == [
        {"input_ids": [0, 1], "trainable": [False, True], "seq_lengths": [2]}
    ]


def test_row_longer_than_the_limit_is_refused_by_bfd():
    with pytest.raises(DataError, match="sequence 1 has 4 tokens"):
        pack_prepared(tokenized(2, 4), max_length=3)


def test_limit_without_room_for_a_prediction_is_refused():
    with pytest.raises(ConfigError, match="max_length=1"):
        pack_prepared(tokenized(2), max_length=1)


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
