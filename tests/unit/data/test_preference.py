from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
from tokenizers import processors

from prefrl.data.preference import prepare_preference_dataset, prepare_reward_dataset, prepare_unpaired_dataset
from prefrl.errors import ConfigError, DataError
from tests.assets import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

GSM8K = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "gsm8k_8.jsonl").read_text().splitlines()]


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


HI = "<|user|>hi<|end|><|assistant|>"
TEXT = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
CHAT = {"prompt": [user("hi")], "chosen": [bot("yo")], "rejected": [bot("no")]}
WHOLE_CHAT = {"chosen": [user("hi"), bot("yo")], "rejected": [user("hi"), bot("no")]}
RATED = [
    {"prompt": "a", "completion": "x", "label": True},
    {"prompt": "a", "completion": "y", "label": False},
    {"prompt": "b", "completion": "z", "label": True},
]


def as_dataset(rows):
    return datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows


def streamed(rows):
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def pairs(rows, tokenizer=None, **options):
    options = {"max_length": None, "truncation": "right", "invalid_rows": "error"} | options
    return prepare_preference_dataset(as_dataset(rows), tokenizer or tiny_tokenizer(), **options)


def reward(rows, tokenizer=None, **options):
    options = {"max_length": None, "invalid_rows": "error"} | options
    return prepare_reward_dataset(as_dataset(rows), tokenizer or tiny_tokenizer(), **options)


def unpaired(rows, tokenizer=None, **options):
    options = {"max_length": None, "truncation": "right", "invalid_rows": "error", "with_mismatched": False} | options
    return prepare_unpaired_dataset(as_dataset(rows), tokenizer or tiny_tokenizer(), **options)


def text_of(token_ids, tokenizer=None):
    return "".join((tokenizer or tiny_tokenizer()).convert_ids_to_tokens(token_ids))


def texts(row, tokenizer=None):
    """The columns of ids in order, as text."""
    return [text_of(ids, tokenizer) for name, ids in row.items() if name.endswith("_ids")]


def bos_tokenizer():
    tokenizer = chat_tokenizer(templates.LLAMA3)
    bos = tokenizer.convert_tokens_to_ids("<|bos|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    return tokenizer


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="prefrl")
    return lambda: [record.getMessage() for record in caplog.records]


# --- pairs ---


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(TEXT, ["2+2=", "4<|end|>", "five<|end|>"], id="text"),
        pytest.param({"chosen": "2+2=4", "rejected": "2+2=5"}, ["2+2=", "4<|end|>", "5<|end|>"], id="implicit text"),
        pytest.param({"chosen": "ab", "rejected": "abc"}, ["ab", "<|end|>", "c<|end|>"], id="one goes on"),
        pytest.param({**TEXT, "chosen": "4<|end|>"}, ["2+2=", "4<|end|>", "five<|end|>"], id="has its end"),
        pytest.param(CHAT, [HI, "yo<|end|>", "no<|end|>"], id="chat"),
        pytest.param(WHOLE_CHAT, [HI, "yo<|end|>", "no<|end|>"], id="implicit chat"),
        pytest.param({**WHOLE_CHAT, "prompt": "hi"}, [HI, "yo<|end|>", "no<|end|>"], id="chat with prompt in text"),
        pytest.param(
            {**CHAT, "prompt": [user("hi"), bot("y")]},
            [HI + "y", "yo<|end|>", "no<|end|>"],
            id="goes on with the prompt's last turn",
        ),
        pytest.param(
            # Turns common to both sides are the prompt, but an assistant's turn at its end would be gone on with.
            {name: [user("hi"), bot("a"), bot(last)] for name, last in (("chosen", "b"), ("rejected", "c"))},
            [HI, "a<|end|><|assistant|>b<|end|>", "a<|end|><|assistant|>c<|end|>"],
            id="common answer",
        ),
        pytest.param(
            {"chosen": [user("hi"), bot("a")], "rejected": [user("hi"), bot("a"), user("b"), bot("c")]},
            [HI, "a<|end|>", "a<|end|><|user|>b<|end|><|assistant|>c<|end|>"],
            id="one conversation ends earlier",
        ),
    ],
)
def test_pair_has_one_prompt_and_two_completions_that_end(row, expected):
    rows = pairs([row])
    assert rows.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert texts(rows[0]) == expected


def test_completion_stops_with_its_end_token():
    tokenizer = chat_tokenizer(templates.CHATML)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts(pairs([CHAT], tokenizer)[0], tokenizer) == [prompt, "yo<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize("template", [templates.THINKING, templates.OPENS_THINKING, templates.STRICT])
def test_prompt_is_what_generation_reads(template):
    tokenizer = chat_tokenizer(template)
    opening = tokenizer.apply_chat_template(CHAT["prompt"], tokenize=False, add_generation_prompt=True)
    prompt, *completions = texts(pairs([CHAT], tokenizer)[0], tokenizer)
    assert opening.startswith(prompt)
    assert [text.split("<|")[0] for text in completions] == ["yo", "no"]


def test_token_across_the_border_belongs_to_the_completions_of_both_sides():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["=4"])
    assert texts(pairs([TEXT], tokenizer)[0], tokenizer) == ["2+2", "=4<|end|>", "=five<|end|>"]


def test_what_the_template_writes_differently_for_each_side_is_not_the_prompt():
    row = {**CHAT, "rejected": [bot("no"), user("b"), bot("c")]}
    rows = pairs([row], tiny_tokenizer(chat_template="a{{ messages|length }}" + CHAT_TEMPLATE))
    assert texts(rows[0])[:2] == ["a", "2" + HI + "yo<|end|>"]
    with pytest.raises(DataError, match="the prompt has no tokens of its own"):
        pairs([row], tiny_tokenizer(chat_template="{{ messages|length }}" + CHAT_TEMPLATE))


def test_common_tokens_of_the_completions_are_not_the_prompts():
    assert texts(pairs([{**TEXT, "chosen": "4", "rejected": "44"}])[0]) == ["2+2=", "4<|end|>", "44<|end|>"]


def test_bos_is_the_prompts_first_token():
    tokenizer = bos_tokenizer()
    rows = [TEXT, {**TEXT, "prompt": "<|bos|>2+2="}]
    assert [texts(row, tokenizer)[0] for row in pairs(rows, tokenizer)] == ["<|bos|>2+2="] * 2
    assert texts(pairs([{"chosen": "ab", "rejected": "ac"}], tokenizer)[0], tokenizer)[0] == "<|bos|>a"


def test_tools_and_template_arguments_of_a_row_reach_both_sides():
    tokenizer = chat_tokenizer("{{ tools[0].name }}{{ mood }}" + templates.CHATML)
    row = {**CHAT, "tools": '[{"name": "add"}]', "chat_template_kwargs": {"mood": "A"}}
    assert texts(pairs([row], tokenizer)[0], tokenizer)[0].startswith("addA<|im_start|>")


@pytest.mark.parametrize(
    ("truncation", "max_length", "expected"),
    [
        ("right", 9, ["2+2=", "4<|end|>", "five<|end|>"]),
        ("error", 9, ["2+2=", "4<|end|>", "five<|end|>"]),
        ("right", 6, ["2+2=", "4<|end|>", "fi"]),
        ("right", 5, ["2+2=", "4", "f"]),
        ("left", 8, ["+2=", "4<|end|>", "five<|end|>"]),
        ("left", 6, ["=", "4<|end|>", "five<|end|>"]),
    ],
)
def test_prompt_and_longer_completion_are_cut_to_the_limit(truncation, max_length, expected):
    assert texts(pairs([TEXT], truncation=truncation, max_length=max_length)[0]) == expected


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({**TEXT, "chosen": ""}, {}, "column 'chosen' is ''"),
        ({**TEXT, "prompt": None}, {}, "column 'prompt' is None"),
        ({**TEXT, "rejected": "4"}, {}, "chosen and rejected have the same 2 tokens"),
        ({**TEXT, "rejected": "4!"}, {"max_length": 5}, "have the same 1 tokens"),
        (TEXT, {"max_length": 4}, "the prompt has 4 tokens, which leaves none for the completion within max_length=4"),
        (
            TEXT,
            {"max_length": 5, "truncation": "left"},
            "the completion has 5 tokens, which leaves none for the prompt",
        ),
        (TEXT, {"max_length": 8, "truncation": "error"}, "has 9 tokens, more than the 8 allowed"),
    ],
)
def test_unusable_text_pair_is_named_or_dropped(row, options, reason, warnings):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError) as error:
        pairs([good, row], **options)
    assert "1 of 2 rows cannot be used: row 1: " in str(error.value)
    assert reason in str(error.value)
    assert [texts(row)[0] for row in pairs([good, row], invalid_rows="drop", **options)] == ["a"]
    assert reason in warnings()[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "ab", "rejected": "xb"}, "start with different tokens"),
        ({"chosen": "ab", "rejected": "ab<|end|>c"}, "one completion has no token of its own"),
        ({"chosen": "ab", "rejected": "ab"}, "one completion has no token of its own"),
        ({**WHOLE_CHAT, "chosen": [user("ho"), bot("yo")]}, "no common message"),
        ({**WHOLE_CHAT, "chosen": [bot("hi")], "rejected": [bot("hi"), bot("b")]}, "no common message"),
        ({**WHOLE_CHAT, "chosen": [user("hi"), user("b")]}, "message 1) has role 'user'"),
        ({**WHOLE_CHAT, "chosen": []}, "column 'chosen' is []"),
        ({**CHAT, "chosen": [{"role": "bot", "content": "a"}]}, "column 'chosen', message 0 has role 'bot'"),
        ({**CHAT, "chosen": [user("a")]}, "starts with role 'user'"),
        ({**CHAT, "rejected": [bot("yo")]}, "chosen and rejected have the same 3 tokens"),
    ],
)
def test_unusable_pair_of_other_formats_is_named(row, reason):
    is_text = isinstance(row["chosen"], str)
    good = {"chosen": "ab", "rejected": "ac"} if is_text else (CHAT if "prompt" in row else WHOLE_CHAT)
    with pytest.raises(DataError, match="1 of 2 rows cannot be used: row 1: ") as error:
        pairs([good, row])
    assert reason in str(error.value)


def test_bos_alone_is_no_common_start():
    with pytest.raises(DataError, match="start with different tokens"):
        pairs([{"chosen": "ab", "rejected": "xb"}], bos_tokenizer())


def test_completion_without_tokens_is_unusable():
    silent = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}{% if add_generation_prompt %}{% endif %}")
    with pytest.raises(DataError, match="the completion has no tokens once the chat template is applied"):
        pairs([CHAT], silent)


@pytest.mark.parametrize("prepare", [pairs, reward, unpaired])
@pytest.mark.parametrize("columns", [{"prompt_ids": [1]}, {"chosen_ids": [1], "completion_ids": [1]}])
def test_columns_of_the_result_are_reserved(prepare, columns):
    row = {"prompt": "a", "completion": "b", "label": True} if prepare is unpaired else TEXT
    if prepare is reward and "prompt_ids" in columns:
        assert reward([{**row, **columns}]).column_names == ["chosen_ids", "rejected_ids"]
        return
    with pytest.raises(DataError, match="is reserved"):
        prepare([{**row, **columns}])


@pytest.mark.parametrize("prepare", [pairs, reward, unpaired])
def test_limit_below_one_is_refused(prepare):
    with pytest.raises(ConfigError, match="a limit of 0 tokens"):
        prepare([TEXT], max_length=0)


@pytest.mark.parametrize("prepare", [pairs, reward, unpaired])
def test_text_needs_an_end_token(prepare):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos_token"):
        prepare([TEXT], tokenizer)


@pytest.mark.parametrize("prepare", [pairs, unpaired])
@pytest.mark.parametrize(("template", "count"), [(templates.NO_END, 1), (templates.CHATML, 0)])
def test_template_without_end_token_is_warned_of_once(prepare, template, count, warnings):
    prepare([CHAT, {**CHAT, "prompt": [user("b")]}], chat_tokenizer(template))
    assert sum("does not learn to stop" in message for message in warnings()) == count


@pytest.mark.parametrize("prepare", [pairs, reward, unpaired])
def test_end_that_stands_twice_is_warned_of_once(prepare, warnings):
    row = {**CHAT, "chosen": [bot("yo<|end|>")]}
    prepare([row, {**row, "prompt": [user("b")]}])
    assert ["ends with '<|end|>' twice (last ids" in message for message in warnings()] == [True]


@pytest.mark.parametrize("row", [TEXT, CHAT, WHOLE_CHAT, {"chosen": "ab", "rejected": "ac"}])
@pytest.mark.parametrize("prepare", [pairs, reward, unpaired])
def test_stream_gives_the_rows_of_the_dataset(prepare, row):
    rows = [row, row | {"chosen": row["rejected"], "rejected": row["chosen"]}]
    assert list(prepare(streamed(rows))) == list(prepare(rows))


def test_from_value_conversations_are_read():
    row = {"chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    row["rejected"] = [row["chosen"][0], {"from": "gpt", "value": "no"}]
    assert texts(pairs([row])[0]) == [HI, "yo<|end|>", "no<|end|>"]
    assert texts(unpaired([row])[1]) == [HI, "no<|end|>"]


def test_gsm8k_pairs_are_the_same_whether_the_prompt_is_given_or_found():
    rows = [
        {"prompt": row["question"] + "\nA: ", "chosen": row["answer"], "rejected": "~" + row["answer"]}
        for row in GSM8K
    ]
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    chats = [{side: [user(row["prompt"]), bot(row[side])] for side in ("chosen", "rejected")} for row in rows]
    assert list(pairs(rows)) == list(pairs(whole))
    for row, given, chat in zip(rows, pairs(rows), pairs(chats), strict=True):
        assert texts(given) == [row["prompt"], row["chosen"] + "<|end|>", row["rejected"] + "<|end|>"]
        assert (chat["chosen_ids"], chat["rejected_ids"]) == (given["chosen_ids"], given["rejected_ids"])


# --- reward models ---


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (TEXT, ["2+2=4<|end|>", "2+2=five<|end|>"]),
        ({"chosen": "good", "rejected": "bad"}, ["good<|end|>", "bad<|end|>"]),
        (CHAT, [HI + "yo<|end|>", HI + "no<|end|>"]),
        (WHOLE_CHAT, [HI + "yo<|end|>", HI + "no<|end|>"]),
    ],
)
def test_reward_model_reads_whole_sequences(row, expected):
    rows = reward([row])
    assert rows.column_names == ["chosen_ids", "rejected_ids"]
    assert texts(rows[0]) == expected


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_reward_model_needs_an_answer_on_each_side(side):
    rows = [WHOLE_CHAT, {**WHOLE_CHAT, side: [user("hi"), user("ho")]}]
    with pytest.raises(DataError, match=f"1 of 2 rows .*row 1: column '{side}' has no message with role 'assistant'"):
        reward(rows)


def test_reward_model_needs_no_end_token(warnings):
    reward([CHAT], chat_tokenizer(templates.NO_END))
    assert warnings() == []


def test_conversation_is_rendered_for_the_reward_model_as_the_template_ends_it():
    tokenizer = chat_tokenizer(templates.CHATML)
    chosen = reward([CHAT], tokenizer)[0]["chosen_ids"]
    assert text_of(chosen, tokenizer) == tokenizer.apply_chat_template(CHAT["prompt"] + CHAT["chosen"], tokenize=False)


@pytest.mark.parametrize("margin", [2, -0.5])
def test_margin_is_kept_as_a_number(margin):
    assert reward([{**TEXT, "margin": margin}])[0]["margin"] == margin


@pytest.mark.parametrize("margin", [None, float("nan"), float("inf"), "1", True])
def test_other_margin_makes_a_row_unusable(margin):
    rows = streamed([{**TEXT, "margin": margin}])
    with pytest.raises(DataError, match=f"column 'margin' is {margin!r}: needs a finite number"):
        list(reward(rows))


def test_sequence_over_the_limit_is_unusable_and_never_cut(warnings):
    rows = [TEXT, {**TEXT, "rejected": "sixty"}]
    with pytest.raises(DataError, match=r"row 1: has 10 tokens, more than max_length=9"):
        reward(rows, max_length=9)
    assert texts(reward(rows, max_length=9, invalid_rows="drop")[0]) == ["2+2=4<|end|>", "2+2=five<|end|>"]
    assert len(warnings()) == 1


def test_equal_sequences_are_unusable_for_a_reward_model():
    with pytest.raises(DataError, match="row 1: chosen and rejected have the same 6 tokens"):
        reward([TEXT, {**TEXT, "rejected": "4"}])


# --- labeled completions ---


def test_labeled_completion_is_parted_from_its_prompt():
    rows = unpaired(RATED)
    assert rows.column_names == ["prompt_ids", "completion_ids", "label"]
    assert [texts(row) for row in rows] == [["a", "x<|end|>"], ["a", "y<|end|>"], ["b", "z<|end|>"]]
    assert rows["label"][:] == [True, False, True]


def test_conversation_is_parted_from_its_prompt():
    row = {"prompt": [user("hi")], "completion": [bot("yo")], "label": True}
    assert texts(unpaired([row, {**row, "label": False}])[0]) == [HI, "yo<|end|>"]


@pytest.mark.parametrize(("truncation", "expected"), [("right", ["2+2=", "fi"]), ("left", ["=", "five<|end|>"])])
def test_labeled_row_is_cut_to_the_limit(truncation, expected):
    row = {"prompt": "2+2=", "completion": "five", "label": 1}
    assert texts(unpaired([row], truncation=truncation, max_length=6)[0]) == expected


@pytest.mark.parametrize("rows", [[TEXT], [{"chosen": "2+2= 4", "rejected": "2+2= five"}]])
def test_pair_becomes_a_desirable_and_an_undesirable_row(rows):
    found = {row["label"]: texts(row) for row in unpaired(rows)}
    assert {label: "".join(parts).replace(" ", "") for label, parts in found.items()} == {
        True: "2+2=4<|end|>",
        False: "2+2=five<|end|>",
    }
    assert found[True][0] == found[False][0] == "2+2="


def test_unusable_pair_is_named_by_its_own_number_or_dropped(warnings):
    rows = [{"chosen": "ab", "rejected": "ac"}, {"chosen": "ab", "rejected": "xb"}]
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used: row 1: .*no common text"):
        unpaired(rows)
    assert sorted(row["label"] for row in unpaired(rows, invalid_rows="drop")) == [False, True]
    assert len(warnings()) == 1


def test_rows_of_pairs_have_both_labels_nearby_and_neighbors_with_other_prompts():
    rows = unpaired([{"prompt": letter, "chosen": "x", "rejected": "y"} for letter in "abcdef"])
    assert rows["label"][:] == [True, True, False, False] * 3
    prompts = rows["prompt_ids"][:]
    assert all(a != b for a, b in pairwise(prompts))


def test_row_of_a_pair_that_does_not_fit_is_named_as_unpaired():
    with pytest.raises(
        DataError, match=r"row 1: has 9 tokens.*Correct them, or.*numbered as in unpair_preference_dataset"
    ):
        unpaired([TEXT], max_length=8, truncation="error")


@pytest.mark.parametrize(("label", "expected"), [(1, True), (0, False), (True, True), (False, False)])
def test_label_is_a_bool_or_a_bit(label, expected):
    assert unpaired([{**RATED[0], "label": label}])[0]["label"] is expected


@pytest.mark.parametrize("label", [None, 2, "yes", 1.0])
def test_other_label_makes_a_row_unusable(label):
    with pytest.raises(DataError, match=f"row 0: column 'label' is {label!r}: needs True or False"):
        unpaired([{**RATED[0], "label": label}])


@pytest.mark.parametrize(("rows", "counts"), [(RATED[:1], "1 desirable and 0"), (RATED[1:2], "0 desirable and 1")])
def test_labels_of_one_side_are_warned_of(rows, counts, warnings):
    unpaired(rows)
    assert [counts in message for message in warnings()] == [True]


def test_labels_of_both_sides_are_not_warned_of(warnings):
    unpaired(RATED)
    assert warnings() == []


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("aabccc", (5, 5, 1, 2, 2, 2)),  # the first two have none before them and go around the end
        ("abba", (2, 0, 0, 2)),  # where the last row has the same prompt
    ],
)
def test_mismatched_completion_is_that_of_the_nearest_earlier_row_with_another_prompt(prompts, expected):
    rows = [{"prompt": p, "completion": str(i), "label": i % 2 == 0} for i, p in enumerate(prompts)]
    prepared = unpaired(rows, with_mismatched=True)
    assert [text_of(ids) for ids in prepared["KL_completion_ids"]] == [f"{i}<|end|>" for i in expected]
    assert prepared.column_names == ["prompt_ids", "completion_ids", "label", "KL_completion_ids"]


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_mismatched_completion_is_cut_to_the_room_behind_the_prompt(truncation):
    rows = [RATED[0], {"prompt": "12345", "completion": "6", "label": False}]
    prepared = unpaired(rows, with_mismatched=True, max_length=6, truncation=truncation)
    for row in prepared:
        assert len(row["prompt_ids"]) + len(row["KL_completion_ids"]) <= 6
    expected = {"left": ["6<|end|>", "x<|end|>"], "right": ["6", "x"]}[truncation]
    assert [text_of(ids) for ids in prepared["KL_completion_ids"]] == expected


def test_pairs_with_other_prompts_are_made_after_rows_are_dropped_and_alike_in_streams():
    rows = [RATED[0], {**RATED[2], "completion": ""}, {"prompt": "c", "completion": "w", "label": False}]
    options = {"with_mismatched": True, "invalid_rows": "drop"}
    prepared = list(unpaired(rows, **options))
    assert [text_of(row["KL_completion_ids"]) for row in prepared] == ["w<|end|>", "x<|end|>"]
    assert list(unpaired(streamed(rows), **options)) == prepared


def test_row_without_another_prompt_within_1000_rows_has_no_mismatched_completion():
    rows = [{"prompt": "ab"[i % 2], "completion": "c", "label": i % 2 == 0} for i in range(1001)]
    for prepared in (unpaired(rows, with_mismatched=True, num_proc=2), unpaired(streamed(rows), with_mismatched=True)):
        lengths = [len(row["KL_completion_ids"]) for row in prepared]
        assert lengths == [2] * 1000 + [0]


def test_one_prompt_alone_has_no_mismatched_completion():
    with pytest.raises(DataError, match="no two rows within 1000 have different prompts"):
        unpaired(RATED[:2], with_mismatched=True)
    assert len(unpaired(RATED[:2])) == 2
