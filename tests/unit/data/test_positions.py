"""Rows that are longer than the model can read, or than it was trained for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl import DataError
from prefrl.data.checks import ID_COLUMNS, check_positions
from prefrl.models.plans import PositionLimit
from prefrl.options.types import LengthBound
from tests.assets import tiny_model, tiny_reward_model
from tests.contract.cases import make_trainer

TABLE, COMPUTED = PositionLimit(6, is_table=True), PositionLimit(6, is_table=False)
UNBOUNDED = LengthBound(None, "max_length")

# Rows of 6 tokens, which fit, and of 7, which do not.
PAIRS = [
    {"prompt_ids": [1, 2], "chosen_ids": [1] * 4, "rejected_ids": [1]},
    {"prompt_ids": [1, 2], "chosen_ids": [1], "rejected_ids": [1] * 5},
]
UNPAIRED = [
    {"prompt_ids": [1, 2], "completion_ids": [1] * 4, "KL_completion_ids": [1]},
    {"prompt_ids": [1, 2], "completion_ids": [1], "KL_completion_ids": [1] * 5},
]
SEQUENCES = [{"chosen_ids": [1] * 6, "rejected_ids": [1] * 6}, {"chosen_ids": [1] * 7, "rejected_ids": [1]}]
TEXTS = [{"input_ids": [1] * 6}, {"input_ids": [1] * 7}]
PACKED = [
    {"input_ids": [1] * 8, "seq_lengths": [6, 2]},  # each sequence has positions of its own
    {"input_ids": [1] * 8, "seq_lengths": [1, 7]},
]
KINDS = [PAIRS, UNPAIRED, SEQUENCES, TEXTS, PACKED]


def checked(
    rows: list[dict[str, Any]], limit: PositionLimit | None, bound: LengthBound = UNBOUNDED, *, stream: bool = False
) -> list[dict[str, Any]]:
    dataset = Dataset.from_list(rows)
    given: Any = dataset.to_iterable_dataset() if stream else dataset
    return list(check_positions(given, limit, bound, columns=ID_COLUMNS))


@pytest.mark.parametrize("rows", KINDS)
@pytest.mark.parametrize(("stream", "row"), [(False, "1 of 2 rows .* row 1"), (True, "row 1 of the stream")])
def test_row_beyond_a_table_of_positions_is_refused(rows: list[dict[str, Any]], stream: bool, row: str) -> None:
    assert checked(rows[:1], TABLE, stream=stream) == rows[:1]
    message = rf"{row} has 7 tokens, but max_position_embeddings=6 .* Lower max_length, so that rows have at most 6"
    with pytest.raises(DataError, match=message):
        checked(rows, TABLE, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_row_beyond_computed_positions_is_warned_of_once(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        assert checked([*TEXTS, *TEXTS], COMPUTED, stream=stream) == [*TEXTS, *TEXTS]
    assert ["row 1" in message and "was not trained on" in message for message in caplog.messages] == [True]


def test_sampled_tokens_need_positions_too(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt_ids": [1] * 2}, {"prompt_ids": [1] * 3}]
    bound = LengthBound(None, "max_prompt_length or max_completion_length", sampled=4)
    with pytest.raises(DataError, match=r"row 1 has 3 tokens in the prompt, and 4 are sampled, .* at most 6 tokens"):
        checked(rows, TABLE, bound)
    assert checked(rows[:1], TABLE, bound) == rows[:1]


def test_what_the_options_bound_or_the_model_does_not_limit_is_not_read() -> None:
    unread: Any = object()
    for limit, bound in ((TABLE, LengthBound(6, "")), (TABLE, LengthBound(2, "", sampled=4)), (None, UNBOUNDED)):
        assert check_positions(unread, limit, bound, columns=ID_COLUMNS) is unread
    with pytest.raises(AttributeError):
        check_positions(unread, TABLE, LengthBound(3, "", sampled=4), columns=ID_COLUMNS)


@pytest.mark.parametrize("algorithm", ["sft", "reward", "grpo"])
def test_trainer_refuses_rows_beyond_the_models_table(algorithm: str, tmp_path: Path) -> None:
    make = tiny_reward_model if algorithm == "reward" else tiny_model
    option = "max_completion_length" if algorithm == "grpo" else "max_length"  # no prompt alone has 30 tokens
    with pytest.raises(DataError, match=f"max_position_embeddings=30 .*Lower .*{option}"):
        make_trainer(algorithm, tmp_path, model=make(architecture="gpt2", n_positions=30))
