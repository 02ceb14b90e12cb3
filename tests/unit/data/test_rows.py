from __future__ import annotations

import logging

import datasets
import pytest

from prefrl.data.packing import drop_rows, map_rows
from prefrl.errors import ConfigError, DataError

FEATURES = datasets.Features(half=datasets.Value("int64"))
EVEN_AND_ODD = [0, 1, 2, 3, 4, 5, 7, 9]


def halve(row):
    if row["x"] % 2:
        raise DataError(f"{row['x']} is odd")
    return {"half": row["x"] // 2}


def rows_of(values, *, stream=False):
    rows = datasets.Dataset.from_dict({"x": values, "other": ["o"] * len(values)})
    return rows.to_iterable_dataset() if stream else rows


def mapped(values, *, stream=False, **options):
    options = {"invalid_rows": "error", "num_proc": None, "desc": "Halving"} | options
    return map_rows(rows_of(values, stream=stream), halve, options.pop("features", FEATURES), **options)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="prefrl")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("invalid_rows", ["error", "drop"])
@pytest.mark.parametrize("stream", [True, False])
def test_good_rows_come_out_with_the_new_columns_alone(stream, invalid_rows, warnings):
    assert list(mapped([0, 6], stream=stream, invalid_rows=invalid_rows)) == [{"half": 0}, {"half": 3}]
    assert warnings() == []


def test_column_of_the_dataset_that_is_asked_for_is_kept():
    rows = mapped([6], features=datasets.Features({**FEATURES, "other": datasets.Value("string")}))
    assert rows[0] == {"half": 3, "other": "o"}


def test_all_bad_rows_are_in_one_error_that_spells_out_the_first_of_a_kind():
    with pytest.raises(DataError) as error:
        mapped(EVEN_AND_ODD)
    assert str(error.value) == (
        "5 of 8 rows cannot be used: row 1: 1 is odd; the same in rows 3, 5 and 2 more. "
        "Correct them, or set invalid_rows='drop' to train without them"
    )


def test_caller_can_say_what_to_do():
    with pytest.raises(DataError, match=r"1 of 1 rows cannot be used: row 0: 3 is odd\. Try twos$"):
        mapped([3], remedy="Try twos")


def test_dropped_rows_are_named_in_one_warning(warnings):
    assert mapped(EVEN_AND_ODD, invalid_rows="drop")["half"][:] == [0, 1, 2]
    assert warnings() == [
        "5 of 8 rows cannot be used: row 1: 1 is odd; the same in rows 3, 5 and 2 more. "
        "They are dropped. Correct them to train on them"
    ]


def test_dropping_all_rows_is_an_error():
    with pytest.raises(DataError, match=r"2 of 2 rows .*: row 0: 1 is odd; the same in row 1\. Correct them"):
        mapped([1, 3], invalid_rows="drop")


def test_bug_in_the_encoder_is_not_taken_for_a_bad_row():
    with pytest.raises(KeyError):
        map_rows(
            rows_of([1]), lambda row: {"half": row["y"]}, FEATURES, invalid_rows="drop", num_proc=None, desc="Failing"
        )


def test_several_processes_name_the_same_rows():
    with pytest.raises(DataError, match="row 1: 1 is odd; the same in rows 3, 5 and 2 more"):
        mapped(EVEN_AND_ODD, num_proc=2)


def test_stream_raises_when_its_bad_row_is_reached():
    rows = iter(mapped([0, 2, 3, 4], stream=True))
    assert [next(rows), next(rows)] == [{"half": 0}, {"half": 1}]
    with pytest.raises(DataError, match=r"row 2 of the stream cannot be used: 3 is odd\. Correct them, or set"):
        next(rows)


def test_stream_drops_all_bad_rows_and_logs_the_first_three(warnings):
    rows = mapped(EVEN_AND_ODD, stream=True, invalid_rows="drop")
    for _ in range(2):
        assert list(rows) == [{"half": 0}, {"half": 1}, {"half": 2}]
    assert warnings() == [
        "row 1 of the stream cannot be used and is dropped: 1 is odd",
        "row 3 of the stream cannot be used and is dropped: 3 is odd",
        "row 5 of the stream cannot be used and is dropped: 5 is odd. Further rows are dropped without a message",
    ]


def test_processes_for_a_stream_are_refused():
    with pytest.raises(ConfigError, match="dataset_num_proc=2: a streaming dataset"):
        mapped([0], stream=True, num_proc=2)


def test_stream_goes_on_where_its_state_was_saved():
    rows = mapped(EVEN_AND_ODD, stream=True, invalid_rows="drop")
    reader = iter(rows)
    next(reader)
    next(reader)
    state = rows.state_dict()
    resumed = mapped(EVEN_AND_ODD, stream=True, invalid_rows="drop")
    resumed.load_state_dict(state)
    assert list(resumed) == [{"half": 2}]


def test_rows_are_dropped_by_number(warnings):
    rows = drop_rows(rows_of([5, 6, 7]), {1: "even"}, remedy="Halve it")
    assert rows["x"][:] == [5, 7]
    assert warnings() == ["1 of 3 rows cannot be used: row 1: even. They are dropped. Halve it"]
