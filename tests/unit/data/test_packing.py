from __future__ import annotations

import datasets
import pytest

from prefrl.data.packing import pack_bfd, pack_prepared
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


def test_wrapped_without_any_loss_left_is_refused():
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "trainable": [False, False, True]}])
    with pytest.raises(DataError, match="leaves no token to train on"):
        pack_prepared(rows, max_length=2, strategy="wrapped")


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_stream_is_packed_in_windows_of_1000_rows(strategy):
    rows = tokenized(*[2, 3, 4] * 500)
    windows = [pack_prepared(rows.select(part), max_length=9, strategy=strategy) for part in WINDOWS]
    packed = list(pack_prepared(rows.to_iterable_dataset(), max_length=9, strategy=strategy))
    assert packed == [row for window in windows for row in window]


def test_window_of_a_stream_without_any_loss_is_left_out():
    dead = {"input_ids": [1, 2, 3, 4], "trainable": [False, False, True, False]}
    stream = datasets.IterableDataset.from_generator(lambda: iter([dead] * 1000 + [*tokenized(2)]))
    assert list(pack_prepared(stream, max_length=2, strategy="wrapped")) == [
        {"input_ids": [0, 1], "trainable": [False, True], "seq_lengths": [2]}
    ]


def test_row_longer_than_the_limit_is_refused_by_bfd():
    with pytest.raises(DataError, match="sequence 1 has 4 tokens"):
        pack_prepared(tokenized(2, 4), max_length=3)


def test_limit_without_room_for_a_prediction_is_refused():
    with pytest.raises(ConfigError, match="max_length=1"):
        pack_prepared(tokenized(2), max_length=1)
