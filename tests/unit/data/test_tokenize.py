from __future__ import annotations

import json
import logging
from pathlib import Path

import datasets
import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from prefrl.data.tokenize import decoded_completion, prepare_prompt_dataset, prepare_sft_dataset
from prefrl.errors import ConfigError, DataError
from tests.assets import tiny_tokenizer
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer, trained_text

GSM8K = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "gsm8k_8.jsonl").read_text().splitlines()]
ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "yo"}
ASK_MORE = {"role": "user", "content": "and?"}
SAY_MORE = {"role": "assistant", "content": "no"}


def sft(rows, tokenizer=None, **options):
    options = {"max_length": None, "truncation": "right", "invalid_rows": "error"} | options
    rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    return prepare_sft_dataset(rows, tokenizer or tiny_tokenizer(), **options)


def prompts(rows, tokenizer=None, **options):
    options = {"max_prompt_length": None} | options
    return prepare_prompt_dataset(datasets.Dataset.from_list(rows), tokenizer or tiny_tokenizer(), **options)


def text_of(token_ids, tokenizer=None):
    return "".join((tokenizer or tiny_tokenizer()).convert_ids_to_tokens(token_ids))


def bos_tokenizer(before="<|bos|>", chat_template=templates.LLAMA3):
    """Adds `before` and, as a trap, `<|eot|>` behind a text."""
    tokenizer = chat_tokenizer(chat_template)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|bos|>", "<|eot|>")}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A <|eot|>", special_tokens=list(ids.items())
    )
    return tokenizer


# --- supervised fine-tuning ---


def test_text_gets_an_end_token_and_a_loss_on_all_but_its_first_token():
    rows = sft([{"text": "ab"}, {"text": "c<|end|>"}])
    assert [text_of(row["input_ids"]) for row in rows] == ["ab<|end|>", "c<|end|>"]
    assert rows["trainable"][:] == [[False, True, True], [False, True]]
    assert rows.column_names == ["input_ids", "trainable"]


def test_end_token_that_also_pads_keeps_its_loss():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert trained_text(sft([{"prompt": "a", "completion": "b"}], tokenizer)[0], tokenizer) == ["b<|end|>"]
    chat = sft([{"messages": [ASK, SAY]}], tokenizer, assistant_only_loss=True)[0]
    assert trained_text(chat, tokenizer) == ["yo<|end|>"]


def test_completion_has_the_loss_and_the_prompt_has_not():
    rows = sft([{"prompt": "2+2=", "completion": "4"}, {"prompt": "a", "completion": " bc"}])
    assert text_of(rows[0]["input_ids"]) == "2+2=4<|end|>"
    assert [trained_text(row, tiny_tokenizer()) for row in rows] == [["4<|end|>"], [" bc<|end|>"]]


def test_completion_only_loss_false_trains_on_the_prompt_too():
    row = sft([{"prompt": "2+2=", "completion": "4"}], completion_only_loss=False)[0]
    assert row["trainable"] == [False, True, True, True, True, True]


def test_tokens_are_those_of_the_whole_text_tokenized_once():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["=4"])
    row = sft([{"prompt": "2+2=", "completion": "4"}], tokenizer)[0]
    assert row["input_ids"][:-1] == tokenizer("2+2=4", add_special_tokens=False)["input_ids"]
    assert trained_text(row, tokenizer) == ["=4<|end|>"]


def test_bos_is_added_once_and_never_trained():
    tokenizer = bos_tokenizer()
    rows = sft([{"text": "ab"}, {"text": "<|bos|>ab"}], tokenizer)
    assert [text_of(row["input_ids"], tokenizer) for row in rows] == ["<|bos|>ab<|end|>"] * 2
    row = sft([{"messages": [ASK, SAY]}], tokenizer)[0]
    assert text_of(row["input_ids"], tokenizer).count("<|bos|>") == 1


def test_what_the_tokenizer_puts_before_a_prompt_has_no_loss():
    row = sft([{"prompt": "a", "completion": "b"}], bos_tokenizer("<|bos|> <|bos|>"))[0]
    assert row["trainable"] == [False, False, False, True, True]


@pytest.mark.parametrize(("template", "warnings"), [(templates.NO_END, 1), (templates.CHATML, 0)])
def test_template_without_end_token_is_warned_of_once(template, warnings, caplog):
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        sft([{"messages": [ASK, SAY]}] * 2, chat_tokenizer(template))
    assert ["does not learn to stop" in record.getMessage() for record in caplog.records] == [True] * warnings


EOS_TWICE = "ends with '<|end|>' twice (last ids"
BOS_TWICE = "starts with bos_token '<|bos|>' twice (first ids"


@pytest.mark.parametrize(
    ("row", "template", "problems"),
    [
        ({"text": "ab<|end|>"}, templates.CHATML, []),
        ({"text": "ab<|end|><|end|>"}, templates.CHATML, [EOS_TWICE]),
        ({"text": "ab<|end|>\n"}, templates.CHATML, [EOS_TWICE]),
        ({"text": "a<|end|>b"}, templates.CHATML, []),
        ({"prompt": "a<|end|>", "completion": "b"}, templates.CHATML, []),
        ({"text": "<|bos|><|bos|>ab"}, templates.CHATML, [BOS_TWICE]),
        ({"messages": [ASK, SAY]}, templates.LLAMA3, []),
        ({"messages": [ASK, SAY]}, "{{ bos_token }}" + templates.LLAMA3, [BOS_TWICE]),
        ({"messages": [ASK, SAY | {"content": "yo<|im_end|>"}]}, templates.CHATML, ["ends with '<|im_end|>' twice"]),
        ({"messages": [ASK, SAY]}, templates.ENDS_TEXT, []),
        ({"messages": [ASK, SAY | {"content": "yoo"}]}, templates.NO_END, ["ends with 'nt: yoo"]),
        ({"messages": [ASK, SAY]}, "{{ bos_token }}{{ bos_token }}" + templates.NO_END, [BOS_TWICE, "ends with "]),
    ],
)
def test_special_token_that_stands_twice_is_warned_of_with_its_ids(row, template, problems, caplog):
    tokenizer = chat_tokenizer(template)
    prepared = sft([row] * 2, tokenizer)
    messages = [record.getMessage() for record in caplog.records]
    assert [
        message.startswith(f"Row 0 of the dataset {p}") for message, p in zip(messages, problems, strict=True)
    ] == [True for _ in problems]
    for message in messages:
        ids = prepared[0]["input_ids"]
        assert str(ids[:8] if "starts" in message else ids[-8:]) in message


def test_whole_conversation_is_trained_by_default():
    row = sft([{"messages": [ASK, SAY]}])[0]
    assert text_of(row["input_ids"]) == "<|user|>hi<|end|><|assistant|>yo<|end|>"
    assert trained_text(row, tiny_tokenizer()) == ["hi<|end|><|assistant|>yo<|end|>"]


def test_assistant_only_loss_trains_each_of_the_assistants_turns():
    row = sft([{"messages": [ASK, SAY, ASK_MORE, SAY_MORE]}], assistant_only_loss=True)[0]
    assert trained_text(row, tiny_tokenizer()) == ["yo<|end|>", "no<|end|>"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["yo<|end|><|tool|>5<|end|><|assistant|>no<|end|>"]),
        ({"assistant_only_loss": True}, ["yo<|end|>", "no<|end|>"]),
        ({"assistant_only_loss": True, "completion_only_loss": True}, ["yo<|end|>", "no<|end|>"]),
        ({"assistant_only_loss": True, "completion_only_loss": False}, ["no<|end|>", "yo<|end|>", "no<|end|>"]),
    ],
)
def test_completion_and_assistant_masks_combine(options, expected):
    tool = {"role": "tool", "content": "5"}
    row = sft([{"prompt": [ASK, SAY_MORE, ASK], "completion": [SAY, tool, SAY_MORE]}], **options)[0]
    assert trained_text(row, tiny_tokenizer()) == expected


@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}])
def test_completion_that_continues_the_prompts_last_turn_is_trained_from_there(options):
    row = sft([{"prompt": [ASK, SAY], "completion": [{"role": "assistant", "content": "da"}]}], **options)[0]
    assert text_of(row["input_ids"]) == "<|user|>hi<|end|><|assistant|>yoda<|end|>"
    assert trained_text(row, tiny_tokenizer()) == ["da<|end|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (templates.CHATML, "yo<|im_end|>"),
        (templates.DEFAULT_SYSTEM, "yo<|im_end|>"),
        (templates.LLAMA3, "yo<|eot|>"),
        (templates.THINKING, "yo<|im_end|>"),
        (templates.OPENS_THINKING, "yo<|eot|>"),
        (templates.STRICT, "yo<|im_end|>"),
    ],
)
@pytest.mark.parametrize("as_pair", [True, False])
def test_mask_is_the_same_for_pairs_and_conversations(template, expected, as_pair):
    tokenizer = chat_tokenizer(template)
    row = {"prompt": [ASK], "completion": [SAY]} if as_pair else {"messages": [ASK, SAY]}
    assert trained_text(sft([row], tokenizer, assistant_only_loss=not as_pair)[0], tokenizer) == [expected]


def test_slow_tokenizer_gives_the_same_mask():
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = templates.CHATML
    row = sft([{"messages": [ASK, SAY, ASK_MORE, SAY_MORE]}], tokenizer, assistant_only_loss=True)[0]
    assert trained_text(row, tokenizer) == ["yo<|im_end|>", "no<|im_end|>"]


def test_from_value_conversations_are_trained_on():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    row = sft([{"conversations": turns}], assistant_only_loss=True)[0]
    assert text_of(row["input_ids"]) == "<|user|>hi<|end|><|assistant|>yo<|end|>"


def test_tools_and_template_kwargs_of_a_row_are_honoured():
    template = "{{ tools[0].name }}{{ mood }}{{ tone }}" + templates.CHATML
    row = {"messages": [ASK, SAY], "tools": '[{"name": "add"}]', "chat_template_kwargs": {"mood": "A"}}
    tokenizer = chat_tokenizer(template)
    tokens = sft([row], tokenizer, chat_template_kwargs={"mood": "B", "tone": "C"})[0]["input_ids"]
    assert text_of(tokens, tokenizer).startswith("addAC<|im_start|>")


@pytest.mark.parametrize(
    ("truncation", "text", "trainable"),
    [("right", "abc", [False, True, True]), ("left", "de<|end|>", [False, True, True])],
)
def test_truncation_cuts_one_side_and_leaves_no_loss_on_the_first_token(truncation, text, trainable):
    row = sft([{"text": "abcde"}], max_length=3, truncation=truncation)[0]
    assert (text_of(row["input_ids"]), row["trainable"]) == (text, trainable)


def test_row_as_long_as_the_limit_is_kept_whole():
    assert text_of(sft([{"text": "ab"}], max_length=3, truncation="error")[0]["input_ids"]) == "ab<|end|>"


def test_truncation_error_names_row_length_and_limit():
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used: row 1: has 6 tokens, more than the 5 allowed"):
        sft([{"text": "ab"}, {"text": "abcde"}], max_length=5, truncation="error")


def test_rows_without_loss_are_an_error_or_dropped_with_one_warning(caplog):
    rows = [{"prompt": "a", "completion": "b"}] + [{"prompt": "abcd", "completion": "b"}] * 2
    with pytest.raises(
        DataError, match=r"2 of 3 rows .*row 1: no token to train on .*max_length=3.*; the same in row 2"
    ):
        sft(rows, max_length=3)
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        prepared = sft(rows, max_length=3, invalid_rows="drop")
    assert [text_of(row["input_ids"]) for row in prepared] == ["ab<|end|>"]
    assert ["2 of 3 rows cannot be used: row 1: " in record.getMessage() for record in caplog.records] == [True]


def test_bad_first_row_is_dropped_like_any_other(caplog):
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        rows = sft([{"text": None}, {"text": ""}, {"text": "ab"}], invalid_rows="drop")
    assert [text_of(row["input_ids"]) for row in rows] == ["ab<|end|>"]


def test_conversation_that_cannot_be_read_hides_no_missing_end_token(caplog):
    rows = [{"messages": [{"role": "bot", "content": "a"}]}, {"messages": [ASK, SAY]}]
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        sft(rows, chat_tokenizer(templates.NO_END), invalid_rows="drop")
    assert sum("does not learn to stop" in record.getMessage() for record in caplog.records) == 1


def test_tokenizer_without_chat_template_is_refused_at_once():
    with pytest.raises(DataError, match=r"^tokenizer .* has no chat template, but columns \['messages'\]"):
        sft([{"messages": [ASK, SAY]}], tiny_tokenizer(chat_template=None))


def test_stream_gives_the_rows_of_the_dataset_and_reads_each_once_per_pass():
    rows = [{"text": "ab"}, {"text": "c"}, {"text": "de"}]
    read = []

    def generate():
        for row in rows:
            read.append(row["text"])
            yield row

    stream = sft(datasets.IterableDataset.from_generator(generate), max_length=2)
    first = read.copy()
    assert set(first) == {"ab"}  # nothing but the format is looked at beforehand
    assert list(stream) == list(sft(rows, max_length=2))
    assert read[len(first) :] == ["ab", "c", "de"]


def test_stream_of_from_value_conversations_is_converted():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"conversations": turns}]))
    assert text_of(next(iter(sft(stream)))["input_ids"]) == "<|user|>hi<|end|><|assistant|>yo<|end|>"


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"text": "a"}, {"text": None}], ["row 1", "'text'", "None"]),
        ([{"text": "a"}, {"text": ""}], ["row 1", "'text'", "''"]),
        ([{"messages": [ASK, SAY]}, {"messages": [ASK, {"role": "bot", "content": "a"}]}], ["row 1", "'bot'"]),
        ([{"text": "a", "trainable": [1]}], ["'trainable' is reserved"]),
        ([{"messages": [ASK, SAY]}, {"messages": [ASK]}], ["row 1", "'messages'", "'assistant'", "['user']"]),
    ],
)
def test_bad_row_is_named(rows, parts):
    with pytest.raises(DataError) as error:
        sft(rows)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("row", "options", "part"),
    [
        ({"text": "a"}, {"completion_only_loss": True}, "completion_only_loss=True"),
        ({"messages": [ASK, SAY]}, {"completion_only_loss": True}, "completion_only_loss=True"),
        ({"text": "a"}, {"assistant_only_loss": True}, "assistant_only_loss=True"),
        ({"text": "a"}, {"max_length": 0}, "0 tokens"),
    ],
)
def test_option_that_does_not_fit_the_dataset_is_refused(row, options, part):
    with pytest.raises(ConfigError) as error:
        sft([row], **options)
    assert part in str(error.value)


def test_tokenizer_without_end_token_is_refused_for_text():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos_token"):
        sft([{"text": "a"}], tokenizer)


def test_preparation_is_cached_between_runs(tmp_path):
    datasets.Dataset.from_list([{"text": "ab"}]).save_to_disk(tmp_path)
    first, second = (sft(datasets.load_from_disk(tmp_path), max_length=9, truncation="left") for _ in range(2))
    other = sft(datasets.load_from_disk(tmp_path), max_length=2, truncation="left")
    assert first.cache_files == second.cache_files != other.cache_files


def test_gsm8k_rows_round_trip_with_the_answer_trained():
    tokenizer = tiny_tokenizer()
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in GSM8K]
    chats = [
        {"prompt": [{"role": "user", "content": p["prompt"]}],
         "completion": [{"role": "assistant", "content": p["completion"]}]} for p in pairs
    ]  # fmt: skip
    for row, plain, chat in zip(GSM8K, sft(pairs), sft(chats), strict=True):
        assert trained_text(plain, tokenizer) == trained_text(chat, tokenizer) == [row["answer"] + "<|end|>"]
        assert text_of(plain["input_ids"]) == row["question"] + row["answer"] + "<|end|>"


# --- prompts ---


def test_prompts_keep_their_columns_and_get_ids():
    rows = prompts([{"prompt": "2+2=", "answer": "4"}, {"prompt": "a", "answer": "b"}])
    assert rows.column_names == ["prompt", "answer", "prompt_ids"]
    assert rows[0]["answer"] == "4"
    assert [text_of(ids) for ids in rows["prompt_ids"]] == ["2+2=", "a"]


def test_plain_prompt_gets_the_bos_but_not_what_the_tokenizer_puts_behind():
    tokenizer = bos_tokenizer()
    rows = prompts([{"prompt": "ab"}, {"prompt": "<|bos|>ab"}], tokenizer)
    assert [text_of(ids, tokenizer) for ids in rows["prompt_ids"]] == ["<|bos|>ab"] * 2


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([ASK], "<|user|>hi<|end|><|assistant|>"), ([ASK, SAY], "<|user|>hi<|end|><|assistant|>yo")],
)
def test_conversational_prompt_is_open_for_the_assistant(messages, expected):
    assert text_of(prompts([{"prompt": messages}])[0]["prompt_ids"]) == expected


@pytest.mark.parametrize(("side", "expected"), [("left", "de"), ("right", "ab")])
def test_long_prompts_are_truncated(side, expected):
    rows = prompts([{"prompt": "abcde"}, {"prompt": "x"}], max_prompt_length=2, truncation=side)
    assert [text_of(ids) for ids in rows["prompt_ids"]] == [expected, "x"]
    assert rows["prompt"][:] == ["abcde", "x"]


def test_prompts_are_truncated_on_the_left_by_default():
    assert text_of(prompts([{"prompt": "abcde"}], max_prompt_length=2)[0]["prompt_ids"]) == "de"


def test_prompt_truncation_error_names_row_length_and_limit():
    with pytest.raises(DataError, match=r"row 1: has 5 tokens, more than the 2 allowed"):
        prompts([{"prompt": "x"}, {"prompt": "abcde"}], max_prompt_length=2, truncation="error")


def test_overlong_prompts_are_filtered_with_one_warning(caplog):
    rows = [{"prompt": "ab"}, {"prompt": "abcde"}, {"prompt": "abc"}]
    with caplog.at_level(logging.WARNING, logger="prefrl"):
        kept = prompts(rows, max_prompt_length=2, filter_overlong=True, truncation="error")
    assert kept["prompt"][:] == ["ab"]
    assert ["2 of 3 rows" in r.getMessage() and "row 1" in r.getMessage() for r in caplog.records] == [True]


def test_filtering_out_all_prompts_is_an_error():
    with pytest.raises(DataError, match=r"1 of 1 rows .*prompt of 3 tokens, more than max_prompt_length=2"):
        prompts([{"prompt": "abc"}], max_prompt_length=2, filter_overlong=True)


def test_filter_without_limit_is_refused():
    with pytest.raises(ConfigError, match="filter_overlong=True has no effect"):
        prompts([{"prompt": "abc"}], filter_overlong=True)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"prompt": "a"}, {"prompt": ""}], ["row 1", "'prompt'", "''"]),
        ([{"prompt": "a"}, {"prompt": None}], ["row 1", "'prompt'", "None"]),
        ([{"messages": [ASK]}], ["'prompt' is missing"]),
    ],
)
def test_bad_prompt_is_named(rows, parts):
    with pytest.raises(DataError) as error:
        prompts(rows)
    assert [part for part in parts if part not in str(error.value)] == []


def test_prompt_without_tokens_is_refused():
    tokenizer = tiny_tokenizer(chat_template="{% if add_generation_prompt %}{% endif %}")
    with pytest.raises(DataError, match=r"row 0.*no tokens"):
        prompts([{"prompt": [ASK]}], tokenizer)


def test_all_bad_prompts_are_listed():
    with pytest.raises(DataError, match=r"2 of 3 rows cannot be used: row 0: .*; row 2: .*dataset\.filter") as error:
        prompts([{"prompt": ""}, {"prompt": "a"}, {"prompt": None}])
    assert "invalid_rows" not in str(error.value)


@pytest.mark.parametrize("filters", [False, True])
def test_a_stream_of_prompts_has_the_rows_of_the_dataset(filters):
    rows = [{"prompt": "a b c d e f", "answer": 1}, {"prompt": "b", "answer": 2}]
    options = {"max_prompt_length": 4, "filter_overlong": filters}
    expected = prepare_prompt_dataset(datasets.Dataset.from_list(rows), tiny_tokenizer(), **options)
    known = datasets.Dataset.from_list(rows).to_iterable_dataset()
    unknown = datasets.IterableDataset.from_generator(lambda: iter(rows))  # of columns without types
    for stream in (known, unknown):
        assert list(prepare_prompt_dataset(stream, tiny_tokenizer(), **options)) == list(expected)


def test_a_bad_prompt_of_a_stream_is_named_when_it_is_read():
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a"}, {"prompt": ""}]))
    prepared = prepare_prompt_dataset(stream, tiny_tokenizer(), max_prompt_length=None)
    with pytest.raises(DataError, match=r"row 1 of the stream cannot be used: .*'prompt'.*dataset\.filter"):
        list(prepared)


def test_from_value_prompts_reach_the_rewards_as_messages():
    rows = prompts([{"prompt": [{"from": "human", "value": "hi"}]}])
    assert rows[0]["prompt"] == [ASK]
    assert text_of(rows[0]["prompt_ids"]) == "<|user|>hi<|end|><|assistant|>"


def test_decoded_completion_leaves_special_tokens_out():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("#### 4<|end|>")["input_ids"]
    assert decoded_completion(tokenizer, ids, conversational=False) == "#### 4"
    assert decoded_completion(tokenizer, ids, conversational=True) == [{"role": "assistant", "content": "#### 4"}]


def test_prompt_that_starts_twice_is_warned_of(caplog):
    twice = "{{ bos_token }}" + templates.LLAMA3
    prompts([{"prompt": [ASK]}], chat_tokenizer(templates.CHATML))
    assert caplog.messages == []  # a prompt has no end that is learned
    prompts([{"prompt": [ASK]}], chat_tokenizer(twice))
    assert [BOS_TWICE in message for message in caplog.messages] == [True]
