"""Datasets that are token ids already."""

from __future__ import annotations

import datasets
import pytest

from prefrl.errors import ConfigError, DataError
from tests.assets import tiny_tokenizer
from tests.unit.data.test_preference import pairs, reward, unpaired
from tests.unit.data.test_tokenize import prompts, sft

IDS = [10, 11, 12, 13]
TAIL = [False, False, True, True]
SFT = {"input_ids": IDS, "text": "of another tokenizer"}
PAIR = {"prompt_ids": [10, 11], "chosen_ids": [12, 13, 1], "rejected_ids": [14, 1]}


@pytest.mark.parametrize(
    ("columns", "options", "trainable"),
    [
        ({}, {}, [False, True, True, True]),
        ({"labels": [-100, -100, 12, 13]}, {}, TAIL),
        ({"labels": IDS, "completion_mask": [0, 0, 0, 1]}, {}, [False, True, True, True]),
        ({"completion_mask": [0, 0, 1, 1]}, {}, TAIL),
        ({"completion_mask": [0, 0, 1, 1]}, {"completion_only_loss": True}, TAIL),
        ({"completion_mask": [0, 0, 1, 1]}, {"completion_only_loss": False}, [False, True, True, True]),
        ({"assistant_masks": [0, 0, 1, 1]}, {}, TAIL),
        ({"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}, {}, [False, False, True, False]),
    ],
)
def test_labels_or_masks_say_which_ids_are_learned(columns, options, trainable):
    rows = sft([SFT | columns], **options)
    assert rows[:] == {"input_ids": [IDS], "trainable": [trainable]}


def test_padding_is_left_out():
    row = {"input_ids": [0, 0, 10, 11, 12, 0], "attention_mask": [0, 0, 1, 1, 1, 0], "labels": [0, 0, 10, -100, 12, 0]}
    assert sft([row])[:] == {"input_ids": [[10, 11, 12]], "trainable": [[False, False, True]]}


def test_ids_are_truncated():
    assert sft([SFT], max_length=3)["input_ids"][0] == [10, 11, 12]
    assert pairs([PAIR], max_length=4)[:] == {
        "prompt_ids": [[10, 11]],
        "chosen_ids": [[12, 13]],
        "rejected_ids": [[14, 1]],
    }


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_dataset_of_arrays_gives_lists(kind):
    rows = sft(datasets.Dataset.from_list([SFT]).with_format(kind))
    assert rows[0] == {"input_ids": IDS, "trainable": [False, True, True, True]}


def test_ids_of_preference_data_are_taken_as_they_are():
    assert pairs([PAIR | {"prompt": "of another tokenizer"}])[0] == PAIR
    whole = {"chosen_ids": [10, 12], "rejected_ids": [10, 13], "margin": 0.5}
    assert reward([whole])[0] == whole
    old_names = {"chosen_input_ids": [10, 12], "rejected_input_ids": [10, 13], "margin": 0.5}
    assert reward([old_names])[0] == whole
    rows = [{"prompt_ids": [10], "completion_ids": [12, 1], "label": True}]
    rows.append({"prompt_ids": [11], "completion_ids": [13], "label": False})
    assert list(unpaired(rows)) == rows
    assert unpaired(rows, with_mismatched=True)["KL_completion_ids"][:] == [[13], [12, 1]]


def test_prompts_that_are_tokenized_get_their_text():
    ids = tiny_tokenizer()("<|user|>hi<|assistant|>")["input_ids"]
    for column in ("prompt_ids", "input_ids"):
        row = prompts([{column: ids, "answer": "1"}], max_prompt_length=4)[0]
        assert (row["prompt_ids"], row["prompt"]) == (ids[-4:], "<|user|>hi<|assistant|>")
    row = prompts([{"prompt_ids": ids, "prompt": [{"role": "user", "content": "hi"}]}])[0]
    assert row == {"prompt_ids": ids, "prompt": [{"role": "user", "content": "hi"}]}
    assert prompts([{"prompt": "hi", "input_ids": [99]}])[0]["prompt_ids"] == tiny_tokenizer()("hi")["input_ids"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"input_ids": [10, 10**6]},
            "row 1: column 'input_ids' has the id 1000000: ids of the tokenizer are 0 to 102",
        ),
        ({"input_ids": [10, -1]}, "row 1: column 'input_ids' has the id -1"),
        ({"input_ids": []}, "row 1: column 'input_ids' has no token ids"),
        ({"input_ids": None}, "row 1: column 'input_ids' is None: needs a list of integers"),
        ({"labels": [10]}, "row 1: column 'labels' has 1 values for the 4 tokens of input_ids"),
        ({"labels": [11, 12, 13, -100]}, "row 1: column 'labels' has 11 at place 0, where input_ids has 10.*shift"),
        ({"labels": [-100] * 4}, "row 1: no token to train on"),
    ],
)
def test_bad_ids_are_named(columns, message):
    with pytest.raises(DataError, match=message):
        sft([SFT | {"labels": IDS}, SFT | {"labels": IDS} | columns])


def test_flags_are_zero_or_one():
    with pytest.raises(DataError, match=r"'completion_mask' has the values \[0, 1, 2\]: must be 0 or 1"):
        sft([SFT | {"completion_mask": [0, 1, 2, 1]}])


@pytest.mark.parametrize("prepare", [pairs, reward])
def test_bad_ids_of_pairs_are_named(prepare):
    with pytest.raises(DataError, match="row 0: column 'rejected_ids' has the id 103"):
        prepare([PAIR | {"rejected_ids": [103]}])
    with pytest.raises(DataError, match="the same 3 tokens"):
        prepare([PAIR | {"rejected_ids": PAIR["chosen_ids"]}])


@pytest.mark.parametrize(
    ("option", "column"), [("completion_only_loss", "completion_mask"), ("assistant_only_loss", "assistant_masks")]
)
def test_an_option_needs_the_mask_that_it_is_about(option, column):
    with pytest.raises(ConfigError, match=f"{option}=True: the dataset is tokenized.*no column '{column}'"):
        sft([SFT], **{option: True})
