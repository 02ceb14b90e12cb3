from __future__ import annotations

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefrl.data.sources import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from prefrl.errors import ConfigError, DataError

ASK = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "yes"}
BAD = {"role": "assistant", "content": "no"}
MORE = {"role": "user", "content": "why?"}


def text_pairs(count):
    return [
        {"chosen": f"Question {i}: it is good", "rejected": f"Question {i}: it is bad", "id": i} for i in range(count)
    ]


def stream(rows):
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


# --- extract_prompt ---


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),  # not inside the word
        ("Say: Yes.", "Say: Yesterday.", "Say:"),  # nor inside one of the other side's
        ("Say: Yesterday.", "Say: Yes.", "Say:"),
        ("2+2=4", "2+2=5", "2+2="),
        ("Q: a\nA:Yes", "Q: a\nA:No", "Q: a\nA:"),
        ("line\nyes", "line\nno", "line\n"),
        ("a  b", "a  c", "a "),
        ("The sky is", "The sky is blue", "The sky"),  # no side is left empty
        ("same words", "same words", "same"),
        ("abc", "abd", "ab"),  # there is no earlier word
        ("\u5929\u7a7a\u662f\u84dd", "\u5929\u7a7a\u662f\u7eff", "\u5929\u7a7a\u662f"),  # a script without spaces
    ],
)
def test_prompt_of_texts_stops_before_the_word_in_which_they_differ(chosen, rejected, prompt):
    row = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert row == {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


words = st.text("ab ._\n", min_size=1, max_size=12)


@given(words, words, words)
def test_prompt_and_completions_join_to_the_texts_and_none_is_empty(start, chosen, rejected):
    texts = {"chosen": start + chosen, "rejected": start + rejected}
    try:
        row = extract_prompt(texts)
    except DataError:
        prefix = next((i for i, (a, b) in enumerate(zip(*texts.values(), strict=False)) if a != b), None)
        shortest = min(map(len, texts.values())) - 1
        assert not texts["chosen"][: min(shortest, shortest if prefix is None else prefix)].strip()
        return
    assert {side: row["prompt"] + row[side] for side in texts} == texts
    assert all(row.values())
    assert row["prompt"].strip()


@pytest.mark.parametrize(
    ("chosen", "rejected", "turns"),
    [
        ([ASK, GOOD], [ASK, BAD], 1),
        ([ASK, GOOD, MORE, GOOD], [ASK, GOOD, MORE, BAD], 3),
        ([ASK, GOOD, MORE, GOOD], [ASK, BAD, MORE, GOOD], 1),
        ([ASK, GOOD], [ASK, GOOD], 1),
        ([ASK, GOOD], [ASK, GOOD, MORE, BAD], 1),
        ([ASK, GOOD, GOOD], [ASK, GOOD, BAD], 1),  # a prompt ends with what is answered
        ([ASK, GOOD | {"name": None}], [ASK | {"name": None}, BAD], 1),
    ],
)
def test_prompt_of_conversations_is_their_common_messages(chosen, rejected, turns):
    row = extract_prompt({"chosen": chosen, "rejected": rejected})
    clean = [[{"role": m["role"], "content": m["content"]} for m in side] for side in (chosen, rejected)]
    assert row == {"prompt": clean[0][:turns], "chosen": clean[0][turns:], "rejected": clean[1][turns:]}


@pytest.mark.parametrize(
    ("chosen", "rejected", "part"),
    [
        ("Yes", "No", "no common text"),
        (" Yes", " No", "no common text"),
        ("a", "ab", "no common text"),
        ([ASK, GOOD], [MORE, BAD], "no common message"),
        ([GOOD], [GOOD, ASK], "no common message"),
        (
            [ASK, MORE, GOOD],
            [ASK, GOOD],
            "'chosen': the first message after the part that chosen and rejected share (message 1) has role 'user'",
        ),
        ("", "No", "'chosen' is ''"),
    ],
)
@pytest.mark.parametrize("make", [datasets.Dataset.from_list, stream], ids=["map", "stream"])
def test_a_pair_without_a_common_start_is_named(make, chosen, rejected, part):
    good = (
        {"chosen": "a b", "rejected": "a c"}
        if isinstance(chosen, str)
        else {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    )
    with pytest.raises(DataError) as error:
        list(extract_prompt(make([good, good, {"chosen": chosen, "rejected": rejected}])))
    assert str(error.value).startswith("row 2: column")
    assert part in str(error.value)


def test_rows_datasets_streams_and_splits_give_the_same():
    rows = text_pairs(3)
    expected = [extract_prompt(row) | {"id": row["id"]} for row in rows]
    dataset = datasets.Dataset.from_list(rows)
    assert expected[1] == {"prompt": "Question 1: it is", "chosen": " good", "rejected": " bad", "id": 1}
    assert extract_prompt(dataset).to_list() == expected
    assert extract_prompt(dataset, num_proc=2).to_list() == expected
    assert list(extract_prompt(dataset.to_iterable_dataset())) == expected
    assert list(extract_prompt(stream(rows))) == expected
    splits = extract_prompt(datasets.DatasetDict(train=dataset, test=dataset))
    assert isinstance(splits, datasets.DatasetDict)
    assert [splits[name].to_list() for name in ("train", "test")] == [expected, expected]
    # As TRL's users call it.
    assert dataset.map(extract_prompt).to_list() == expected


def test_a_prompt_of_the_same_type_stays_and_one_in_text_beside_conversations_is_replaced():
    explicit = {"prompt": "a", "chosen": "b c", "rejected": "b d"}
    dataset = datasets.Dataset.from_list([explicit])
    assert extract_prompt(dataset).to_list() == [explicit] == [extract_prompt(explicit)]
    repeated = {"prompt": "hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    expected = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    assert extract_prompt(datasets.Dataset.from_list([repeated])).to_list() == [expected] == [extract_prompt(repeated)]


def test_messages_written_as_from_and_value_are_converted():
    ask, good, bad = ({"from": who, "value": text} for who, text in (("human", "hi"), ("gpt", "yes"), ("gpt", "no")))
    dataset = datasets.Dataset.from_list([{"chosen": [ask, good], "rejected": [ask, bad]}])
    assert extract_prompt(dataset).to_list() == [{"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}]


def test_a_stream_is_not_read_before_it_is_iterated():
    read = []

    def generate():
        for row in text_pairs(3000):
            read.append(row)
            yield row

    unpaired = unpair_preference_dataset(datasets.IterableDataset.from_generator(generate))
    assert len(read) < 10
    next(iter(unpaired))
    assert len(read) < 1100


# --- unpair_preference_dataset ---


def test_each_side_becomes_a_row_first_all_chosen_then_all_rejected():
    rows = unpair_preference_dataset(datasets.Dataset.from_list(text_pairs(3)))
    assert set(rows.column_names) == {"prompt", "completion", "label", "id"}
    assert [(row["id"], row["completion"], row["label"]) for row in rows] == [
        *((i, " good", True) for i in range(3)),
        *((i, " bad", False) for i in range(3)),
    ]
    assert all(row["prompt"] == f"Question {row['id']}: it is" for row in rows)


def test_blocks_of_1000_pairs_are_unpaired_one_after_the_other():
    rows = unpair_preference_dataset(datasets.Dataset.from_list(text_pairs(1001)))
    assert rows["label"][:] == [True] * 1000 + [False] * 1000 + [True, False]
    two = unpair_preference_dataset(datasets.Dataset.from_list(text_pairs(3)), batch_size=2, desc="Unpairing")
    assert two["label"][:] == [True, True, False, False, True, False]


def test_pairs_are_unpaired_and_other_data_stay_as_they_are():
    pairs = datasets.Dataset.from_list(text_pairs(3))
    expected = unpair_preference_dataset(pairs).to_list()
    assert maybe_unpair_preference_dataset(pairs, num_proc=1, desc="Unpairing").to_list() == expected
    splits = maybe_unpair_preference_dataset(datasets.DatasetDict(train=pairs))
    assert splits["train"].to_list() == expected
    other = datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}])
    assert maybe_unpair_preference_dataset(other) is other
    assert list(maybe_unpair_preference_dataset(pairs.to_iterable_dataset())) == expected


def test_a_prompt_is_extracted_where_there_is_none():
    pair = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    expected = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    assert maybe_extract_prompt(pair) == expected
    assert maybe_extract_prompt(expected | {"id": 1}) == expected | {"id": 1}
    repeated = {"prompt": "Hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert maybe_extract_prompt(repeated) == {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    assert maybe_extract_prompt({"text": "a"}) == {"text": "a"}


def test_the_order_is_the_same_for_datasets_streams_and_any_number_of_processes():
    dataset = datasets.Dataset.from_list(text_pairs(1001))
    expected = unpair_preference_dataset(dataset).to_list()
    assert unpair_preference_dataset(dataset, num_proc=2).to_list() == expected
    assert list(unpair_preference_dataset(dataset.to_iterable_dataset())) == expected
    assert list(unpair_preference_dataset(stream(text_pairs(1001)))) == expected
    splits = unpair_preference_dataset(datasets.DatasetDict(train=dataset))
    assert splits["train"].to_list() == expected


def test_an_explicit_prompt_is_kept_as_it_is():
    rows = [{"prompt": "b", "chosen": "b c", "rejected": "b d"}]
    assert unpair_preference_dataset(datasets.Dataset.from_list(rows)).to_list() == [
        {"prompt": "b", "completion": "b c", "label": True},
        {"prompt": "b", "completion": "b d", "label": False},
    ]


def test_columns_about_the_pair_are_left_out_and_others_kept_with_their_types():
    features = datasets.Features(
        {
            **{name: datasets.Value("string") for name in ("chosen", "rejected", "source")},
            **{
                name: datasets.Value("float32") for name in ("score_chosen", "rejected_rating", "margin", "difficulty")
            },
        }
    )
    row = dict.fromkeys(("score_chosen", "rejected_rating", "margin", "difficulty"), 0.5)
    rows = [{"chosen": "a b", "rejected": "a c", "source": "web"} | row]
    unpaired = unpair_preference_dataset(datasets.Dataset.from_list(rows, features=features))
    assert set(unpaired.column_names) == {"prompt", "completion", "label", "source", "difficulty"}
    assert unpaired.features["difficulty"] == datasets.Value("float32")
    assert unpaired["source"][:] == ["web", "web"]


def test_sides_whose_messages_have_different_keys_lose_none():
    call = GOOD | {"name": "oracle"}
    dataset = datasets.Dataset.from_list([{"chosen": [ASK, GOOD], "rejected": [ASK, call]}])
    rejected = unpair_preference_dataset(dataset)[1]
    assert rejected["completion"] == [call]


def test_a_key_that_only_late_messages_have_is_kept():
    first = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    last = {"prompt": [MORE], "chosen": [GOOD | {"name": "oracle"}], "rejected": [BAD | {"name": "fool"}]}
    rows = unpair_preference_dataset(datasets.Dataset.from_list([first] * 1000 + [last] * 2))
    assert [row["completion"][0]["name"] for row in rows][1998:] == [None, None, "oracle", "oracle", "fool", "fool"]


@pytest.mark.parametrize("column", ["completion", "label"])
def test_columns_that_would_be_written_over_are_refused(column):
    rows = [row | {column: "x"} for row in text_pairs(2)]
    with pytest.raises(DataError, match=f"column '{column}' would be overwritten"):
        unpair_preference_dataset(datasets.Dataset.from_list(rows))


def test_processes_for_a_stream_are_refused():
    for convert in (extract_prompt, unpair_preference_dataset):
        with pytest.raises(ConfigError, match="num_proc=2"):
            convert(stream(text_pairs(2)), num_proc=2)


def test_data_without_two_sides_is_refused():
    with pytest.raises(DataError, match="'rejected' is missing"):
        unpair_preference_dataset(datasets.Dataset.from_list([{"prompt": "a", "chosen": "b"}]))
