"""Datasets are mixed, and their columns become those that a trainer reads."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from prefrl.data.sources import RowShape, mix_datasets
from prefrl.errors import ConfigError, DataError

OPTIONS = {"weights": None, "seed": 0, "stopping": "first_exhausted"}


def numbers(*values):
    return datasets.Dataset.from_dict({"x": list(values)})


def as_map(dataset):
    return dataset


def as_stream(dataset):
    return dataset.to_iterable_dataset()


BOTH = pytest.mark.parametrize("kind", [as_map, as_stream])


def values(dataset):
    return [row["x"] for row in dataset]


@BOTH
def test_without_weights_the_datasets_follow_one_another(kind):
    assert values(mix_datasets({"a": kind(numbers(1, 2)), "b": kind(numbers(3))}, **OPTIONS)) == [1, 2, 3]


@BOTH
def test_rows_are_drawn_in_proportion_to_weights_of_any_sum(kind):
    parts = {"a": kind(numbers(*range(4000))), "b": kind(numbers(*range(10_000, 14_000)))}
    mixed = values(mix_datasets(parts, **OPTIONS | {"weights": {"b": 1, "a": 3}}))
    from_a = [value for value in mixed if value < 10_000]
    assert from_a == list(range(4000))
    # 4000 of a are drawn with probability 3/4: of b come 4000/3 with a deviation of 42.
    assert len(mixed) - len(from_a) == pytest.approx(4000 / 3, abs=3 * 42)


@BOTH
def test_the_seed_decides_the_order(kind):
    parts = {"a": kind(numbers(*range(20))), "b": kind(numbers(*range(100, 120)))}

    def mixed(seed):
        return values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}, "seed": seed}))

    assert mixed(0) == mixed(0) != mixed(1)


@BOTH
def test_stopping_at_the_first_end_repeats_nothing_and_at_the_last_leaves_nothing_out(kind):
    parts = {"a": kind(numbers(0, 1)), "b": kind(numbers(*range(10, 20)))}
    first = values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}}))
    assert len(first) == len(set(first)) < 12
    last = values(mix_datasets(parts, **OPTIONS | {"weights": {"a": 1, "b": 1}, "stopping": "all_exhausted"}))
    assert set(last) == {0, 1, *range(10, 20)}
    assert len(last) > 12


@BOTH
def test_columns_may_stand_in_another_order(kind):
    parts = {
        "a": kind(datasets.Dataset.from_dict({"x": [1], "y": ["a"]})),
        "b": kind(datasets.Dataset.from_dict({"y": ["b"], "x": [2]})),
    }
    assert [(row["x"], row["y"]) for row in mix_datasets(parts, **OPTIONS)] == [(1, "a"), (2, "b")]


def no_rows():
    yield from ()


@pytest.mark.parametrize(
    ("parts", "options", "error", "part"),
    [
        ({}, {}, ConfigError, "0 datasets"),
        ({"a": numbers(1)}, {"weights": {"b": 1.0}}, ConfigError, "weights for ['b'], but the datasets are ['a']"),
        ({"a": numbers(1)}, {"weights": {"a": 1.0, "b": 1.0}}, ConfigError, "weights for ['a', 'b']"),
        ({"a": numbers(1)}, {"weights": {"a": 0.0}}, ConfigError, "dataset 'a' is 0.0"),
        ({"a": numbers(1)}, {"weights": {"a": float("nan")}}, ConfigError, "dataset 'a' is nan"),
        ({"a": numbers(1)}, {"weights": {"a": float("inf")}}, ConfigError, "dataset 'a' is inf"),
        ({"a": numbers(1), "b": numbers()}, {}, DataError, "dataset 'b' has 0 rows"),
        ({"b": datasets.IterableDataset.from_generator(no_rows)}, {}, DataError, "dataset 'b' has 0 rows"),
        ({"a": numbers(1), "b": [1]}, {}, DataError, "dataset 'b' is a list"),
        (
            {"a": numbers(1), "b": as_stream(numbers(2))},
            {},
            DataError,
            "'a' is a Dataset, but 'b' is a IterableDataset",
        ),
        (
            {"a": numbers(1), "b": datasets.Dataset.from_dict({"y": [1]})},
            {},
            DataError,
            "dataset 'b' does not have the columns of 'a': ['x'] missing, ['y'] extra",
        ),
        (
            {"a": numbers(1), "b": datasets.Dataset.from_dict({"x": [1], "y": [1]})},
            {},
            DataError,
            "[] missing, ['y'] extra",
        ),
        (
            {"a": numbers(1), "b": numbers("1")},
            {},
            DataError,
            "column 'x' of dataset 'b' has type Value('string'), but in 'a' it has type Value('int64')",
        ),
    ],
)
def test_datasets_that_cannot_be_mixed_are_refused_and_named(parts, options, error, part):
    with pytest.raises(error) as raised:
        mix_datasets(parts, **OPTIONS | options)
    assert part in str(raised.value)


ROWS = [{"question": "1+1?", "answer": "2", "n": 7}, {"question": "2+2?", "answer": None, "n": 8}]
CHATS = [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "system", "content": "own"}]}]


def shaped(rows: list[dict[str, Any]], *, as_stream: bool = False, **options: Any) -> list[dict[str, Any]]:
    dataset = datasets.Dataset.from_list(rows)
    shape = RowShape(**{"renamed": {}, **options})
    return list(shape.apply(dataset.to_iterable_dataset() if as_stream else dataset))


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_column_is_renamed_in_place_of_one_of_its_new_name(as_stream: bool) -> None:
    assert shaped(ROWS, renamed={"prompt": "question", "answer": "n"}, as_stream=as_stream) == [
        {"prompt": "1+1?", "answer": 7},
        {"prompt": "2+2?", "answer": 8},
    ]
    exchanged = shaped(ROWS, renamed={"question": "answer", "answer": "question"}, as_stream=as_stream)
    assert exchanged[0] == {"question": "2", "answer": "1+1?", "n": 7}


def test_a_list_of_columns_also_says_which_ones_to_keep() -> None:
    renamed: dict[str, str] = {"completion": "answer"}
    for more in ({}, {"prompt": "prompt"}):  # what a template makes is kept, named or not
        options = {"renamed": {**renamed, **more}, "kept": ["completion", *more], "prompt_template": "{question}"}
        assert shaped(ROWS[:1], **options) == [{"completion": "2", "prompt": "1+1?"}]


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_template_takes_old_and_new_names_numbers_and_doubled_braces(as_stream: bool) -> None:
    template = "{n:03d} {question} {completion} \\boxed{{}}"
    rows = shaped(ROWS, renamed={"completion": "answer"}, prompt_template=template, as_stream=as_stream)
    assert [row["prompt"] for row in rows] == ["007 1+1? 2 \\boxed{}", None]  # the second row has no answer
    assert rows[0]["question"] == "1+1?"


def test_a_system_prompt_makes_conversations() -> None:
    (row,) = shaped(ROWS[:1], renamed={"prompt": "question", "completion": "answer"}, system_prompt="Add.")
    assert row["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    assert row["completion"] == [{"role": "assistant", "content": "2"}]


def test_a_conversation_keeps_its_own_system_message() -> None:
    first, second = shaped(CHATS, system_prompt="Add.")
    assert [message["content"] for message in first["messages"]] == ["Add.", "hi"]
    assert [message["content"] for message in second["messages"]] == ["own"]


def test_a_system_prompt_precedes_both_sides_of_an_implicit_prompt() -> None:
    sides = {
        side: [{"from": "human", "value": "hi"}, {"from": "gpt", "value": side}] for side in ("chosen", "rejected")
    }
    for rows in ([sides], [{"prompt": "hi", **sides}]):  # a text that repeats the start is not read
        (row,) = shaped(rows, system_prompt="Add.")
        for side in ("chosen", "rejected"):
            assert [message["role"] for message in row[side]] == ["system", "user", "assistant"]
            assert row[side][2]["content"] == side
        assert row.get("prompt") in (None, "hi")


def test_texts_become_messages_where_they_are_asked_to_or_the_answers_are_messages() -> None:
    user, assistant = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    assert shaped([{"prompt": "1+1?", "completion": "2"}], conversational=True) == [
        {"prompt": [user], "completion": [assistant]}
    ]
    rows = [{"question": "1+1?", "completion": [assistant]}]
    assert shaped(rows, prompt_template="{question}")[0]["prompt"] == [user]
    assert shaped(ROWS[:1], prompt_template="{question}")[0]["prompt"] == "1+1?"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            ROWS,
            {"renamed": {"prompt": "qestion"}},
            "columns: the dataset has no column 'qestion'. Did you mean 'questi",
        ),
        (ROWS, {"renamed": {"anser": "anser"}, "kept": ["anser"]}, "columns: the dataset has no column 'anser'."),
        (ROWS, {"prompt_template": "{quest}"}, "prompt_template='{quest}': the dataset has no column 'quest'"),
        (CHATS, {"prompt_template": "{messages}"}, "row 0, column 'messages' is a list: prompt_template="),
        ([{"text": "a"}], {"system_prompt": "s"}, "system_prompt='s': a conversation begins in the column prompt or"),
        ([{"text": "a"}], {"conversational": True}, "conversational=True: a conversation begins in"),
    ],
)
def test_what_cannot_be_done_is_named(rows: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shaped(rows, **options)
