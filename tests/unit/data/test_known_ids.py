"""Ids without an embedding are refused where they occur, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl import DataError
from prefrl.data import checks
from prefrl.data.checks import ID_COLUMNS, check_known_ids
from tests.assets import tiny_model, tiny_tokenizer
from tests.contract.cases import make_trainer

# The tiny tokenizer's last token, which models here have no embedding for.
NEWLINE = len(tiny_tokenizer()) - 1
MESSAGE = re.escape(f"token {chr(10)!r} (id {NEWLINE}) has no embedding, because the model has only {NEWLINE}")


def checked(rows: list[dict[str, Any]], *, stream: bool = False, columns: Any = ID_COLUMNS) -> list[dict[str, Any]]:
    dataset = Dataset.from_list(rows)
    given: Any = dataset.to_iterable_dataset() if stream else dataset
    return list(check_known_ids(given, tiny_tokenizer(), num_embeddings=NEWLINE, columns=columns))


@pytest.mark.parametrize("stream", [False, True])
def test_the_row_and_the_token_are_named(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ROWS_AT_ONCE", 2)
    rows = [{"prompt_ids": [3], "chosen_ids": [NEWLINE - 1], "other": "x"} for _ in range(5)]
    assert checked(rows, stream=stream) == rows
    rows[3]["chosen_ids"] = [5, NEWLINE, 6]
    with pytest.raises(DataError, match=f"row 3 of the tokenized dataset, chosen_ids: {MESSAGE}"):
        checked(rows, stream=stream)
    assert checked(rows, stream=stream, columns=("prompt_ids",)) == rows


def test_lists_may_be_empty_or_missing() -> None:
    assert len(checked([{"KL_completion_ids": []}, {"KL_completion_ids": None}])) == 2


def test_a_trainer_refuses_data_with_such_a_token_and_trains_on_others(tmp_path: Path) -> None:
    good = [{"prompt": f"{i}+1=", "completion": "2"} for i in range(8)]
    options: dict[str, Any] = {"model": tiny_model(vocab_size=NEWLINE)}
    trainer = make_trainer("sft", tmp_path, train_dataset=Dataset.from_list(good), **options)
    trainer.train()
    bad = Dataset.from_list([*good, {"prompt": "1", "completion": "a\nb"}])
    with pytest.raises(DataError, match=f"row 8 of the tokenized dataset, input_ids: {MESSAGE}"):
        make_trainer("sft", tmp_path, train_dataset=bad, **options)
    with pytest.raises(DataError, match=MESSAGE):
        trainer.evaluate({"a": bad})
    prompts = Dataset.from_list([{"prompt": "a", "input_ids": [10**6]}, {"prompt": "b", "input_ids": [1]}])
    make_trainer("grpo", tmp_path, train_dataset=prompts, **options)
