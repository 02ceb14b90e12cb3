"""What is found in the rows of a dataset before a training begins."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from prefrl import DataError
from prefrl.data import checks
from prefrl.data.checks import ID_COLUMNS, check_known_ids, check_positions, warn_of_shared_rows, warn_of_unknown_end
from prefrl.models.plans import PositionLimit
from prefrl.options.types import LengthBound
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer
from tests.unit.data.templates import CHATML, chat_tokenizer

TOKENIZER = chat_tokenizer(CHATML)
END, TURN, NEWLINE, LETTER = TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|im_end|>", "\n", "a"])
CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "chosen": [{"role": "assistant", "content": "yo"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([{"input_ids": [LETTER, TURN, NEWLINE]}], 1),
        ([{"chosen_ids": [LETTER, TURN], "rejected_ids": [LETTER, END]}], 1),
        ([{"input_ids": [LETTER, END]}, {"input_ids": [LETTER, TURN]}], 0),
        # Truncated rows do not show their end.
        ([{"completion_ids": [TURN, LETTER]}, {"completion_ids": [LETTER, TURN]}], 1),
        ([{"input_ids": [LETTER, TURN, LETTER, END], "seq_lengths": [2, 2]}], 1),
        ([{"input_ids": [LETTER, END, LETTER, TURN], "seq_lengths": [2, 2]}], 0),
    ],
)
def test_end_at_which_generation_goes_on_is_warned_of_once(
    rows: list[dict[str, Any]], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unknown_end(Dataset.from_list(rows * 2), TOKENIZER, end_ids=[END])
    assert ["'<|im_end|>'" in message and "only at '<|end|>'" in message for message in caplog.messages] == [
        True
    ] * count


def test_trainer_knows_where_its_model_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([CHAT]), "processing_class": TOKENIZER}
    make_trainer("dpo", tmp_path, model=tiny_model(eos_token_id=[END, TURN]), **given)
    assert "but generation stops only at" not in caplog.text
    make_trainer("dpo", tmp_path, model=tiny_model(eos_token_id=END), **given)
    assert caplog.text.count("but generation stops only at") == 1


# The tiny tokenizer's last token, which models here have no embedding for.
UNKNOWN = len(tiny_tokenizer()) - 1
MESSAGE = re.escape(f"token {chr(10)!r} (id {UNKNOWN}) has no embedding, because the model has only {UNKNOWN}")


def checked(rows: list[dict[str, Any]], *, stream: bool = False, columns: Any = ID_COLUMNS) -> list[dict[str, Any]]:
    dataset = Dataset.from_list(rows)
    given: Any = dataset.to_iterable_dataset() if stream else dataset
    return list(check_known_ids(given, tiny_tokenizer(), num_embeddings=UNKNOWN, columns=columns))


@pytest.mark.parametrize("stream", [False, True])
def test_the_row_and_the_token_are_named(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ROWS_AT_ONCE", 2)
    rows = [{"prompt_ids": [3], "chosen_ids": [UNKNOWN - 1], "other": "x"} for _ in range(5)]
    assert checked(rows, stream=stream) == rows
    rows[3]["chosen_ids"] = [5, UNKNOWN, 6]
    with pytest.raises(DataError, match=f"row 3 of the tokenized dataset, chosen_ids: {MESSAGE}"):
        checked(rows, stream=stream)
    assert checked(rows, stream=stream, columns=("prompt_ids",)) == rows


def test_lists_may_be_empty_or_missing() -> None:
    assert len(checked([{"KL_completion_ids": []}, {"KL_completion_ids": None}])) == 2


def test_a_trainer_refuses_data_with_such_a_token_and_trains_on_others(tmp_path: Path) -> None:
    good = [{"prompt": f"{i}+1=", "completion": "2"} for i in range(8)]
    options: dict[str, Any] = {"model": tiny_model(vocab_size=UNKNOWN)}
    trainer = make_trainer("sft", tmp_path, train_dataset=Dataset.from_list(good), **options)
    trainer.train()
    bad = Dataset.from_list([*good, {"prompt": "1", "completion": "a\nb"}])
    with pytest.raises(DataError, match=f"row 8 of the tokenized dataset, input_ids: {MESSAGE}"):
        make_trainer("sft", tmp_path, train_dataset=bad, **options)
    with pytest.raises(DataError, match=MESSAGE):
        trainer.evaluate({"a": bad})
    prompts = Dataset.from_list([{"prompt": "a", "input_ids": [10**6]}, {"prompt": "b", "input_ids": [1]}])
    make_trainer("grpo", tmp_path, train_dataset=prompts, **options)


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


def positions_checked(
    rows: list[dict[str, Any]], limit: PositionLimit | None, bound: LengthBound = UNBOUNDED, *, stream: bool = False
) -> list[dict[str, Any]]:
    dataset = Dataset.from_list(rows)
    given: Any = dataset.to_iterable_dataset() if stream else dataset
    return list(check_positions(given, limit, bound, columns=ID_COLUMNS))


@pytest.mark.parametrize("rows", KINDS)
@pytest.mark.parametrize(("stream", "row"), [(False, "1 of 2 rows .* row 1"), (True, "row 1 of the stream")])
def test_row_beyond_a_table_of_positions_is_refused(rows: list[dict[str, Any]], stream: bool, row: str) -> None:
    assert positions_checked(rows[:1], TABLE, stream=stream) == rows[:1]
    message = rf"{row} has 7 tokens, but max_position_embeddings=6 .* Lower max_length, so that rows have at most 6"
    with pytest.raises(DataError, match=message):
        positions_checked(rows, TABLE, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_row_beyond_computed_positions_is_warned_of_once(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        assert positions_checked([*TEXTS, *TEXTS], COMPUTED, stream=stream) == [*TEXTS, *TEXTS]
    assert ["row 1" in message and "was not trained on" in message for message in caplog.messages] == [True]


def test_sampled_tokens_need_positions_too(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt_ids": [1] * 2}, {"prompt_ids": [1] * 3}]
    bound = LengthBound(None, "max_prompt_length or max_completion_length", sampled=4)
    with pytest.raises(DataError, match=r"row 1 has 3 tokens in the prompt, and 4 are sampled, .* at most 6 tokens"):
        positions_checked(rows, TABLE, bound)
    assert positions_checked(rows[:1], TABLE, bound) == rows[:1]


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
