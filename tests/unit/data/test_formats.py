from __future__ import annotations

import datasets
import pytest

from prefrl.data.formats import (
    check_not_reserved,
    convert_from_value,
    detect_format,
    get_dataset_column_names,
    read_messages,
    read_text,
    read_tools,
)
from prefrl.errors import DataError

SFT = ("language_modeling", "prompt_completion")
RATED = ("unpaired", "preference")
PAIR = ("prompt", "chosen", "rejected")
ANSWERED = ("prompt", "completion")
ASK = [{"role": "user", "content": "2+2?"}]
SAY = [{"role": "assistant", "content": "4"}]


def dataset(*rows):
    return datasets.Dataset.from_list(list(rows))


@pytest.mark.parametrize(
    ("row", "kinds", "kind", "style", "columns"),
    [
        ({"text": "a", "id": 3}, SFT, "language_modeling", "standard", ("text",)),
        ({"messages": ASK + SAY}, SFT, "language_modeling", "conversational", ("messages",)),
        ({"conversations": ASK + SAY}, SFT, "language_modeling", "conversational", ("conversations",)),
        ({"prompt": "a", "completion": "b"}, SFT, "prompt_completion", "standard", ("prompt", "completion")),
        ({"prompt": ASK, "completion": SAY}, SFT, "prompt_completion", "conversational", ("prompt", "completion")),
        ({"prompt": "a", "completion": "b"}, ("prompt_only",), "prompt_only", "standard", ("prompt",)),
        ({"prompt": ASK, "answer": "4"}, ("prompt_only",), "prompt_only", "conversational", ("prompt",)),
        (
            {"prompt": "a", "completion": "b"},
            ("prompt_only", "prompt_completion"),
            "prompt_completion",
            "standard",
            ("prompt", "completion"),
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, RATED, "preference", "standard", PAIR),
        ({"prompt": ASK, "chosen": SAY, "rejected": SAY}, RATED, "preference", "conversational", PAIR),
        ({"chosen": "b", "rejected": "c", "id": 1}, RATED, "preference", "standard", PAIR[1:]),
        ({"chosen": ASK + SAY, "rejected": ASK + SAY}, RATED, "preference", "conversational", PAIR[1:]),
        # As in UltraFeedback: the prompt in text is the conversations' first message once more.
        ({"prompt": "a", "chosen": ASK, "rejected": ASK}, RATED, "preference", "conversational", PAIR[1:]),
        (
            {"prompt": "a", "completion": "b", "label": True},
            RATED,
            "unpaired",
            "standard",
            ANSWERED,
        ),
        # Labels are judged row by row, not by the format.
        ({"prompt": ASK, "completion": SAY, "label": None}, RATED, "unpaired", "conversational", ANSWERED),
        # As in UltraChat: a prompt beside whole conversations does not make it prompt-completion.
        ({"prompt": "a", "messages": ASK + SAY}, SFT, "language_modeling", "conversational", ("messages",)),
    ],
)
def test_format_follows_from_columns_and_values(row, kinds, kind, style, columns):
    found = detect_format(dataset(row), kinds)
    assert (found.kind, found.style, found.columns) == (kind, style, columns)


def test_text_field_names_the_column_of_plain_text():
    assert detect_format(dataset({"content": "a"}), SFT, text_field="content").columns == ("content",)


@pytest.mark.parametrize(
    ("rows", "kinds", "parts"),
    [
        pytest.param([{"promt": "a"}], ("prompt_only",), ["'prompt'", "['promt']", "did you mean 'promt'"], id="typo"),
        pytest.param([{"Prompt": "a"}], ("prompt_only",), ["did you mean 'Prompt'"], id="case"),
        pytest.param(
            [{"question": "a", "answer": "b"}],
            ("prompt_only",),
            ["did you mean 'question'", "rename_column('question', 'prompt')", "prompt_only {prompt: str | list"],
            id="synonym",
        ),
        pytest.param([{"prompt": "a", "response": "b"}], SFT, ["'completion' is missing", "'response'"], id="half"),
        pytest.param([{"text": "a", "messages": ASK}], SFT, ["fit 2 formats", "remove_columns"], id="ambiguous"),
        pytest.param([{"text": None}], SFT, ["row 0", "'text'", "None"], id="none"),
        pytest.param([{"text": ""}], SFT, ["row 0", "'text'", "''"], id="empty text"),
        pytest.param([{"prompt": 7}], ("prompt_only",), ["row 0", "'prompt'", "7"], id="integer"),
        pytest.param([{"messages": []}], SFT, ["row 0", "'messages'", "[]"], id="no messages"),
        pytest.param([{"text": ASK}], SFT, ["row 0", "'text' holds list of messages, expected str"], id="style"),
        pytest.param([{"prompt": ASK, "completion": "4"}], SFT, ["row 0", "'completion' holds str"], id="mixed"),
        pytest.param([], SFT, ["0 rows"], id="no rows"),
        pytest.param(
            [{"prompt": "a", "chosen": "b", "loser": "c"}],
            RATED,
            ["'rejected' is missing", "did you mean 'loser'", "unpaired {prompt: str | list", "label: bool}"],
            id="half a pair",
        ),
        pytest.param(
            [{"prompt": ASK, "chosen": "b", "rejected": "c"}],
            RATED,
            ["row 0", "'chosen' holds str, expected list of messages"],
            id="mixed pair",
        ),
        pytest.param([{"text": None}, {"text": 3}], SFT, ["row 1, column 'text' is 3"], id="value"),
    ],
)
def test_unusable_dataset_is_refused_with_the_reason(rows, kinds, parts):
    with pytest.raises(DataError) as error:
        detect_format(dataset(*rows), kinds)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([{"text": "a"}], "Dataset.from_list"),
        (datasets.DatasetDict({"test": dataset({"text": "a"})}), "dataset['test']"),
    ],
)
def test_only_a_dataset_is_accepted(value, part):
    with pytest.raises(DataError) as error:
        detect_format(value, SFT)
    assert part in str(error.value)


def test_row_without_values_does_not_decide_the_style():
    found = detect_format(dataset({"prompt": None}, {"prompt": []}, {"prompt": ASK}), ["prompt_only"])
    assert found.style == "conversational"


def test_stream_is_opened_once_and_only_as_far_as_needed():
    read = []

    def generate():
        for row in [{"chosen": None, "rejected": "c"}, {"chosen": "b", "rejected": "c"}, {"chosen": 1, "rejected": 2}]:
            read.append(row["chosen"])
            yield row

    stream = datasets.IterableDataset.from_generator(generate)
    assert stream.column_names is None
    assert detect_format(stream, RATED).columns == ("chosen", "rejected")
    assert read == [None, "b"]


def test_empty_stream_is_refused():
    with pytest.raises(DataError, match="0 rows"):
        detect_format(datasets.IterableDataset.from_generator(lambda: iter([])), SFT)


def test_columns_of_a_stream_are_those_of_its_first_row():
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"a": 1, "input_ids": [2]}]))
    assert get_dataset_column_names(stream) == ["a", "input_ids"]
    with pytest.raises(DataError, match="'input_ids' is reserved"):
        check_not_reserved(stream, ["input_ids"])


@pytest.mark.parametrize("value", [None, "", 3, ["a"]])
def test_cell_without_text_is_refused_with_column_and_value(value):
    with pytest.raises(DataError, match="column 'prompt'") as error:
        read_text({"prompt": value}, "prompt")
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("read", [read_text, read_messages])
def test_cell_that_a_row_of_a_stream_lacks_is_refused(read):
    with pytest.raises(DataError, match="column 'prompt' is None"):
        read({"answer": "4"}, "prompt")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("hi", ["holds text", "'hi'"]),
        (None, ["is None"]),
        ([], ["is []"]),
        (["hi"], ["message 0", "'hi'"]),
        ([*ASK, {"role": "usr", "content": "a"}], ["message 1", "'usr'", "did you mean 'user'", "developer"]),
        ([{"content": "a"}], ["message 0", "role None"]),
        ([*ASK, {"role": "assistant"}], ["message 1", "'assistant'", "no content", "['role']"]),
        ([{"role": "user", "content": ""}], ["message 0", "empty content"]),
        ([{"role": "user", "content": 5}], ["message 0", "content 5"]),
        ([*ASK, {"from": "gpt", "value": "4"}], ["message 1", "from/value", '"role"']),
        (
            [{"role": "tool", "content": "4"}, *ASK],
            ["message 0 (role 'tool')", "does not answer a call", "first message"],
        ),
        (
            [*ASK, {"role": "tool", "content": "4"}],
            ["message 1 (role 'tool')", "does not answer a call", "role 'user'"],
        ),
    ],
)
def test_bad_messages_are_refused_with_their_place(value, parts):
    with pytest.raises(DataError) as error:
        read_messages({"messages": value}, "messages")
    assert [part for part in [*parts, "column 'messages'"] if part not in str(error.value)] == []


def test_results_of_tools_may_follow_each_other_and_turns_may_repeat():
    roles = ["system", "user", "user", "assistant", "tool", "tool", "assistant", "assistant", "tool", "user"]
    conversation = [{"role": role, "content": "a"} for role in roles]
    assert read_messages({"messages": conversation}, "messages") == conversation


def test_messages_lose_the_keys_that_arrow_filled_with_none():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = dataset(
        {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [{"role": "assistant", "content": "f()"}, {"role": "tool", "content": "", "name": "f"}]},
    )
    assert read_messages(rows[0], "messages") == [*ASK, {"role": "assistant", "tool_calls": [call]}]
    assert read_messages(rows[1], "messages")[1] == {"role": "tool", "content": "", "name": "f"}


def test_from_value_messages_are_converted():
    rows = dataset(
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "h"},
                {"from": "gpt", "value": "g"},
            ]
        },
        {"conversations": [{"from": "user", "value": "u"}, {"from": "robot", "value": "r"}]},
    )
    converted = convert_from_value(rows, detect_format(rows, SFT))
    assert read_messages(converted[0], "conversations") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "g"},
    ]
    with pytest.raises(DataError, match="message 1 has role 'robot'"):
        read_messages(converted[1], "conversations")


def test_only_columns_written_as_from_value_are_converted_and_bad_cells_are_left_for_the_reader():
    turn = [{"from": "human", "value": "h"}]
    rows = [{"chosen": turn, "rejected": ASK}, {"chosen": None, "rejected": ASK}, {"chosen": "x", "rejected": ASK}]
    stream = datasets.IterableDataset.from_generator(lambda: iter([*rows, {"chosen": ["y"], "rejected": ASK}]))
    found = detect_format(stream, RATED)
    assert found.from_value == ("chosen",)
    converted = list(convert_from_value(stream, found))
    assert [row["chosen"] for row in converted] == [[{"role": "user", "content": "h"}], None, "x", ["y"]]
    assert [row["rejected"] for row in converted] == [ASK] * 4


def test_other_datasets_are_not_converted():
    rows = dataset({"messages": ASK})
    assert convert_from_value(rows, detect_format(rows, SFT)) is rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ([], None),
        ('[{"name": "f"}]', [{"name": "f"}]),
        ([{"name": "f", "x": None}], [{"name": "f"}]),
    ],
)
def test_tools_are_json_text_or_a_list(value, expected):
    assert read_tools({"tools": value}) == expected


@pytest.mark.parametrize("value", ["{not json", '"f"', 3, ["f"]])
def test_other_tools_are_refused(value):
    with pytest.raises(DataError, match="column 'tools'"):
        read_tools({"tools": value})


def test_reserved_column_is_refused_with_a_new_name():
    with pytest.raises(DataError, match=r"'prompt_ids' is reserved.*rename_column\('prompt_ids', 'my_prompt_ids'\)"):
        check_not_reserved(dataset({"prompt_ids": [1]}), ["prompt_ids"])
