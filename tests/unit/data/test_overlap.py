"""Rows that are evaluated and trained on are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl.data import checks
from prefrl.data.checks import ID_COLUMNS, check_positions, warn_of_shared_rows
from prefrl.models.plans import PositionLimit
from prefrl.options.types import LengthBound
from tests.contract.cases import dataset_of, make_trainer


def warnings_of(training: Any, evaluation: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    warn_of_shared_rows(training, evaluation, columns=ID_COLUMNS)
    return list(caplog.messages)


def rows(*ids: list[int], **others: Any) -> Dataset:
    return Dataset.from_list([{"input_ids": row, **others} for row in ids])


def test_shared_rows_are_counted_and_the_first_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_ROWS_AT_ONCE", 2)
    training = rows([1, 2], [3], [4, 5, 6], [7])
    evaluation = rows([1], [2], [4, 5, 6], [1, 2, 3], [7], [7])
    (message,) = warnings_of(training, evaluation, caplog)
    assert message.startswith("3 of 6 rows of eval_dataset are also in train_dataset; the first is row 2 ")
    chosen = training.select([3, 0])  # datasets keeps such a choice as row numbers, without moving the rows
    assert "2 of 6 rows" in warnings_of(chosen, evaluation, caplog)[0]


def test_rows_that_only_resemble_each_other_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    def pair(prompt: list[int], chosen: list[int], other: list[int]) -> dict[str, list[int]]:
        return {"prompt_ids": prompt, "completion_ids": chosen, "KL_completion_ids": other}

    training = Dataset.from_list([pair([1], [2, 3], [9])])
    assert warnings_of(training, Dataset.from_list([pair([1, 2], [3], [9]), pair([1], [2], [9])]), caplog) == []
    swapped = Dataset.from_list([{"completion_ids": [2, 3], "prompt_ids": [1]}])  # another order of columns
    assert "1 of 1 rows" in warnings_of(training, swapped, caplog)[0]
    # The completion of another prompt depends on the other rows of a dataset.
    assert "1 of 1 rows" in warnings_of(training, Dataset.from_list([pair([1], [2, 3], [8])]), caplog)[0]


def test_each_of_several_evaluation_datasets_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"new": rows([9]), "old": rows([8], [1])}
    (message,) = warnings_of(rows([1]), parts, caplog)
    assert message.startswith("1 of 2 rows of eval_dataset['old'] ")
    assert "row 1 " in message


def test_packed_rows_are_compared_by_their_sequences(caplog: pytest.LogCaptureFixture) -> None:
    training = rows([1, 2, 3, 4, 5], seq_lengths=[2, 3])
    (message,) = warnings_of(training, rows([3], [3, 4, 5]), caplog)
    assert message.startswith("1 of 2 rows of eval_dataset are also in train_dataset; the first is row 1 ")
    packed = Dataset.from_list(
        [{"input_ids": [7, 8], "seq_lengths": [2]}, {"input_ids": [7, 1], "seq_lengths": [1, 1]}]
    )
    (message,) = warnings_of(rows([1]), packed, caplog)
    assert message.startswith("1 of 3 rows of eval_dataset are also in train_dataset; the first is row 1 ")


def test_other_columns_of_prompts_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    prompts = Dataset.from_list([{"prompt_ids": [1, 2], "input_ids": "a", "seq_lengths": "b"}])
    columns = ("prompt_ids",)
    warn_of_shared_rows(prompts, prompts, columns=columns)
    assert "1 of 1 rows" in caplog.text
    bound = LengthBound(None, "max_prompt_length")
    assert check_positions(prompts, PositionLimit(2, is_table=True), bound, columns=columns) is prompts


def test_streams_and_missing_datasets_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    same = rows([1])
    for training, evaluation in ((same, None), (None, same), (same.to_iterable_dataset(), same), (same, {})):
        assert warnings_of(training, evaluation, caplog) == []


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_trainer_tells_of_shared_rows(algorithm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(algorithm, tmp_path, eval_dataset=dataset_of(algorithm).select([5, 3]))
    assert ["2 of 2 rows of eval_dataset" in message for message in caplog.messages if "eval_data" in message] == [
        True
    ]
