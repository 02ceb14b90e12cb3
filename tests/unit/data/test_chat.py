"""Chat templates: what they render, which are taken over, and single rows worked out by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from prefrl.data.chat import (
    ChatTemplate,
    Span,
    assistant_spans,
    encode,
    join_prompt,
    prompt_text,
    special_tokens,
)
from prefrl.data.chat_templates import (
    add_response_schema,
    apply_chat_template,
    clone_chat_template,
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    parse_response,
    prepare_multimodal_messages,
    supports_tool_calling,
)
from prefrl.errors import ConfigError, DataError
from tests.assets import tiny_model, tiny_tokenizer
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer
from tests.unit.data.tool_templates import DEEPSEEK_NEW, FORMATS, HERMES

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": " yo "}
ASK_MORE = {"role": "user", "content": "and?"}
SAY_MORE = {"role": "assistant", "content": "no"}
CHAT = [ASK, SAY, ASK_MORE, SAY_MORE]
THOUGHTS = [
    ASK,
    {"role": "assistant", "content": "<think>x</think>yo"},
    ASK_MORE,
    {"role": "assistant", "content": "<think>y</think>no"},
]


def chat_template(jinja, **kwargs):
    tokenizer = chat_tokenizer(jinja)
    return ChatTemplate(tokenizer, special_tokens(tokenizer), kwargs=kwargs)


def assistant_texts(template, conversation):
    text = template.render(conversation)
    return [text[span.start : span.stop] for span in assistant_spans(template, conversation, text)]


@pytest.mark.parametrize(
    ("jinja", "conversation", "expected"),
    [
        (templates.CHATML, CHAT, [" yo <|im_end|>", "no<|im_end|>"]),
        (templates.DEFAULT_SYSTEM, CHAT, [" yo <|im_end|>", "no<|im_end|>"]),
        (templates.DEFAULT_SYSTEM, [{"role": "system", "content": "s"}, *CHAT], [" yo <|im_end|>", "no<|im_end|>"]),
        (templates.LLAMA3, CHAT, ["yo<|eot|>", "no<|eot|>"]),
        (templates.STRICT, CHAT, ["yo<|im_end|>", "no<|im_end|>"]),
        (templates.ENDS_TEXT, CHAT, [" yo <|eot|>", "no<|eot|>\n<|end|>"]),
        (templates.THINKING, THOUGHTS, ["yo<|im_end|>", "<think>y</think>no<|im_end|>"]),
        (templates.OPENS_THINKING, THOUGHTS, ["yo<|eot|>", "no<|eot|>"]),
        # A conversation may start with the assistant, and it may write twice.
        (templates.CHATML, [SAY, ASK, SAY_MORE, SAY], [" yo <|im_end|>", "no<|im_end|>", " yo <|im_end|>"]),
        # The content of a turn may repeat what stands elsewhere.
        (templates.CHATML, [ASK, {**SAY, "content": "hi"}], ["hi<|im_end|>"]),
    ],
)
def test_assistant_spans_hold_content_and_end_token_only(jinja, conversation, expected):
    assert assistant_texts(chat_template(jinja), conversation) == expected


def test_assistant_spans_with_a_generation_prompt_that_turns_thinking_off():
    template = chat_template(templates.THINKING, enable_thinking=False)
    assert assistant_texts(template, THOUGHTS) == ["yo<|im_end|>", "<think>y</think>no<|im_end|>"]


CALL = {"role": "assistant", "tool_calls": [{"name": "add"}]}
TOOL = {"role": "tool", "content": "5"}


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("call", [CALL, {**CALL, "content": ""}])
def test_turn_that_is_only_a_tool_call_is_found(call, kwargs):
    template = chat_template(templates.TOOLS, **kwargs)
    answer = "<think>\n\n</think>\n\nno<|im_end|>"
    expected = ["<call>add</call><|im_end|>", answer.removeprefix("<think>\n") if kwargs else answer]
    assert assistant_texts(template, [ASK, call, TOOL, SAY_MORE]) == expected


def test_thinking_of_a_turn_is_trained_where_only_a_marker_finds_it():
    # The generation prompt of this template opens something else than what the turn starts with.
    jinja = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>Well, {% endif %}"
    )
    turns = [ASK, {"role": "assistant", "reasoning": "x", "content": "yo"}]
    assert assistant_texts(chat_template(jinja), turns) == ["x</think>yo<|end|>"]


def test_rewritten_content_without_end_token_is_found_by_prefixes():
    jinja = templates.NO_END.replace("m.content", "m.content | upper")
    jinja += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert assistant_texts(chat_template(jinja), CHAT) == [" YO \n", "NO\n"]


def test_turn_is_found_by_its_tail_if_the_last_turn_and_later_ones_differ():
    jinja = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'user' and loop.previtem %}{{ loop.previtem.content | length }} {% endif %}"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    conversation = [ASK, {**SAY, "content": "yo"}, ASK_MORE, SAY_MORE]
    assert assistant_texts(chat_template(jinja), conversation) == ["yo<|end|>", "<think></think>no<|end|>"]


# The new line that starts the content is by chance the one that ends the turn.
@pytest.mark.parametrize("content", ["yo", "\nyo"])
def test_turn_that_cannot_be_found_is_named(content):
    conversation = [ASK, {"role": "assistant", "content": content}, ASK_MORE, SAY_MORE]
    with pytest.raises(DataError, match=r"message 1 \(role 'assistant'\) of 4"):
        assistant_texts(chat_template(templates.SHOUTS), conversation)


def test_turn_that_starts_unlike_the_generation_prompt_and_the_marker_is_named():
    jinja = (
        "{% for m in messages %}<|{{ m.role }}|>{% if '</think>' not in m.content %}<none>{% endif %}{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><none>{% endif %}"
    )
    with pytest.raises(DataError, match=r"message 1 \(role 'assistant'\) of 4"):
        assistant_texts(chat_template(jinja), THOUGHTS)


def test_missing_template_is_named_with_the_remedy():
    with pytest.raises(DataError, match=r"no chat template.*tokenizer\.chat_template"):
        chat_template(None).render(CHAT)


def test_template_that_raises_is_reported_with_its_turn():
    with pytest.raises(DataError, match=r"message 2 \(role 'assistant'\) of 4: .*roles must alternate"):
        chat_template(templates.STRICT).render([ASK, SAY, SAY, ASK])


def test_tools_and_kwargs_reach_the_template():
    tokenizer = chat_tokenizer("{{ tools[0].function.name }}-{{ mood }}-{{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "add"}}
    assert ChatTemplate(tokenizer, (), tools=[tool], kwargs={"mood": "calm"}).render([ASK]) == "add-calm-hi"


def test_prompt_is_open_for_the_assistant():
    assert prompt_text(chat_template(templates.CHATML), [ASK]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_that_ends_with_the_assistant_is_continued():
    assert prompt_text(chat_template(templates.CHATML), [ASK, SAY_MORE]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nno"
    )


def test_completion_goes_on_in_the_turn_that_the_prompt_leaves_open():
    assert join_prompt([ASK], [SAY]) == [ASK, SAY]
    assert join_prompt([ASK, SAY_MORE], [SAY, ASK_MORE]) == [ASK, {"role": "assistant", "content": "no yo "}, ASK_MORE]


def test_completion_must_start_with_the_assistant():
    with pytest.raises(DataError, match="starts with role 'user': must be 'assistant'"):
        join_prompt([ASK], [ASK])


@pytest.mark.parametrize("make", [lambda: chat_tokenizer(None), ByT5Tokenizer], ids=["fast", "slow"])
def test_tokens_are_marked_by_their_characters(make):
    tokenizer = make()
    encoded = encode("abcdef", [Span(0, 1), Span(3, 5)], tokenizer)
    assert encoded.token_ids == tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    assert encoded.in_span == [True, False, False, True, True, False]


@pytest.mark.parametrize(("span", "expected"), [(Span(2, 4), [True, True]), (Span(0, 2), [False, False])])
def test_token_across_a_border_belongs_to_the_span_that_starts_in_it(span, expected):
    tokenizer = chat_tokenizer(None)
    tokenizer.add_tokens(["abc"])
    assert tokenizer("abcd", add_special_tokens=False).tokens() == ["abc", "d"]
    assert encode("abcd", [span], tokenizer).in_span == expected


def test_multi_byte_characters_are_marked_whole():
    encoded = encode("aé!", [Span(1, 2)], ByT5Tokenizer())
    assert encoded.in_span == [False, True, True, False]


NAMES = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
ARGUMENTS = {"a": 3, "b": "x y"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    chat_tokenizer(templates.CHATML).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("multiple", "size"), [(64, 192), (None, 128), (100, 200)])
def test_a_cloned_template_brings_its_tokens_and_every_embedding_has_one(
    source: str, multiple: int | None, size: int
) -> None:
    # 103 tokens here, of which the model has embeddings for 128, and 6 more in the source.
    model, tokenizer = tiny_model(vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    before, embeddings = len(tokenizer), model.get_input_embeddings().weight.clone()
    model, tokenizer, added = clone_chat_template(model, tokenizer, source, resize_to_multiple_of=multiple)
    needed = before + 6
    size = needed if multiple is None else -(-needed // multiple) * multiple
    assert model.vocab_size == len(tokenizer) == size
    assert added == list(range(before, size))
    assert tokenizer.convert_ids_to_tokens(added[:2]) == ["<|bos|>", "<|im_start|>"]
    assert torch.equal(model.get_input_embeddings().weight[:before], embeddings)
    assert tokenizer.chat_template == templates.CHATML
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_the_end_of_a_turn_is_cloned_into_model_and_tokenizer(tmp_path: Path) -> None:
    other = chat_tokenizer(templates.CHATML)
    other.eos_token = "<|im_end|>"
    other.save_pretrained(tmp_path)
    model, tokenizer, _ = clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end


def test_a_source_without_a_template_is_refused(tmp_path: Path) -> None:
    chat_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="this tokenizer has no chat template"):
        clone_chat_template(tiny_model(), tiny_tokenizer(), str(tmp_path))


def test_no_template_has_to_be_patched_but_there_must_be_one() -> None:
    assert get_training_chat_template(chat_tokenizer(templates.THINKING)) is None
    for function in (get_training_chat_template, add_response_schema):
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            function(chat_tokenizer(None))


@pytest.mark.parametrize(
    ("template", "supports"),
    [
        (templates.CHATML, False),  # prints contents alone
        (templates.STRICT, False),  # refuses the role of a tool
        (NAMES, False),  # does not print the arguments
        (HERMES, True),
        (DEEPSEEK_NEW, True),  # takes arguments as text
        (None, False),
    ],
    ids=["contents", "strict", "names", "hermes", "deepseek", "none"],
)
def test_tools_are_supported_if_call_and_result_are_rendered(template: str | None, supports: bool) -> None:
    assert supports_tool_calling(chat_tokenizer(template)) is supports


@pytest.mark.parametrize(
    ("template", "arguments"),
    [(HERMES, ARGUMENTS), (FORMATS["llama3"], ARGUMENTS), (DEEPSEEK_NEW, json.dumps(ARGUMENTS))],
    ids=["hermes", "llama", "deepseek"],
)
def test_a_response_schema_reads_calls_and_text(template: str, arguments: object) -> None:
    tokenizer = chat_tokenizer(template)
    assert add_response_schema(tokenizer) is tokenizer
    written = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)

    def read(**turn: object) -> dict[str, object]:
        whole = tokenizer.apply_chat_template([ASK, {"role": "assistant", **turn}], tokenize=False)
        message: dict[str, object] = tokenizer.parse_response(whole.removeprefix(prompt), prefix=prompt)
        return message

    call = {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    assert read(content="", tool_calls=[written])["tool_calls"] == [call]
    assert read(content="Hello.") == {"role": "assistant", "content": "Hello."}


def test_a_response_is_a_message_and_what_cannot_be_read_is_a_text() -> None:
    tokenizer = add_response_schema(chat_tokenizer(HERMES))
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)

    def read(text: str) -> dict[str, Any]:
        return parse_response(tokenizer, tokenizer(text)["input_ids"], prefix=prompt)

    call = {"name": "add", "arguments": ARGUMENTS}
    message = read(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>")
    assert (message["content"], message["tool_calls"]) == ("", [{"type": "function", "function": call}])
    assert read("Hello.<|im_end|>") == {"role": "assistant", "content": "Hello."}
    for broken in ("{", '{"arguments": {}}', '{"name": 1}'):
        text = f"<tool_call>\n{broken}\n</tool_call>"
        assert read(f"\n{text}") == {"role": "assistant", "content": f"\n{text}"}


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        (templates.CHATML, True),
        (HERMES, True),
        (DEEPSEEK_NEW, True),
        (templates.ENDS_TEXT, False),
        (templates.STRICT, False),  # refuses the role of a tool
    ],
    ids=["chatml", "hermes", "deepseek", "ends text", "strict"],
)
def test_a_template_keeps_prefixes_if_a_call_has_the_same_tokens_with_its_result(template: str, keeps: bool) -> None:
    assert is_chat_template_prefix_preserving(chat_tokenizer(template)) is keeps


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
ENDS_OUTSIDE = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")


def test_a_stop_token_is_trained_if_the_markers_include_it() -> None:
    tokenizer = chat_tokenizer(MARKED)
    assert is_chat_template_stop_token_trained(tokenizer)
    assert not is_chat_template_stop_token_trained(tokenizer, ENDS_OUTSIDE)
    assert not is_chat_template_stop_token_trained(tokenizer, templates.CHATML)
    assert not is_chat_template_stop_token_trained(chat_tokenizer(None))
    assert has_generation_markers({"default": MARKED, "other": ""})
    assert not has_generation_markers({"default": templates.CHATML, "other": MARKED})


def test_calls_that_the_parser_of_transformers_cannot_read_are_refused() -> None:
    tokenizer = chat_tokenizer(FORMATS["lfm2"])
    with pytest.raises(ConfigError, match=r"parse_response cannot read the tool calls .* format is 'lfm2'"):
        add_response_schema(tokenizer)
    assert getattr(tokenizer, "response_template", None) is None
    with pytest.raises(ConfigError, match="renders no tool calls"):
        add_response_schema(chat_tokenizer(templates.CHATML))


QUESTION = {"role": "user", "content": "sky?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("blue", "red"))
# In the template CHATML.
ASKED = "<|im_start|>user\nsky?<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "is_conversation"),
    [
        *(({name: [QUESTION]}, True) for name in ("prompt", "chosen", "rejected", "completion", "messages")),
        ({"prompt": "sky?"}, False),
        ({"prompt": []}, False),
        ({"prompt": [{"content": "no role"}]}, False),
        ({"prompt": ["sky?"]}, False),
        ({"other": [QUESTION]}, False),
        ({"conversations": [{"from": "human", "value": "sky?"}]}, False),
    ],
)
def test_a_row_is_conversational_if_a_column_holds_messages_with_roles(
    row: dict[str, Any], is_conversation: bool
) -> None:
    assert is_conversational(row) is is_conversation


def test_messages_written_as_from_and_value_are_told_apart() -> None:
    assert is_conversational_from_value({"conversations": [{"from": "human", "value": "a"}]})
    for row in (
        {"conversations": [QUESTION]},
        {"conversations": "a"},
        {"conversations": []},
        {"messages": [QUESTION]},
    ):
        assert not is_conversational_from_value(row)


def test_from_and_value_become_role_and_content_under_the_names_of_roles() -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 1}
    before = copy.deepcopy(row)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert maybe_convert_to_chatml(row) == {"messages": messages, "id": 1}
    assert row == before
    pair = {"prompt": [{"from": "user", "value": "a"}], "chosen": "text", "rejected": [GOOD]}
    assert maybe_convert_to_chatml(pair) == pair | {"prompt": [{"role": "user", "content": "a"}]}


def test_a_prompt_opens_the_assistants_turn_and_a_completion_is_what_follows() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    row = {"prompt": [QUESTION], "completion": [GOOD], "label": True, "id": 1}
    text = {"prompt": ASKED + HEADER, "completion": "blue<|im_end|>\n", "label": True}
    assert apply_chat_template(row, tokenizer) == text
    pair = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
    sides = {"chosen": "blue<|im_end|>\n", "rejected": "red<|im_end|>\n"}
    assert apply_chat_template(pair, tokenizer) == {"prompt": ASKED + HEADER, **sides}
    implicit = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
    whole = {name: ASKED + HEADER + side for name, side in sides.items()}
    assert apply_chat_template(implicit, tokenizer) == whole
    assert apply_chat_template({"messages": [QUESTION, GOOD]}, tokenizer) == {"text": whole["chosen"]}


def test_a_prompt_that_the_assistant_began_is_left_open() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    assert apply_chat_template({"prompt": [QUESTION, GOOD]}, tokenizer) == {"prompt": ASKED + HEADER + "blue"}


def test_a_prompt_ends_where_the_conversation_goes_on_otherwise() -> None:
    # Without thinking, the prompt ends with an empty block, which the whole conversation does not have.
    tokenizer = chat_tokenizer(templates.THINKING)
    row = {"prompt": [QUESTION], "completion": [GOOD], "chat_template_kwargs": {"enable_thinking": False}}
    text = apply_chat_template(row, tokenizer)
    assert text == {"prompt": ASKED + HEADER, "completion": "blue<|im_end|>\n"}
    alone = {"prompt": ASKED + HEADER + "<think>\n\n</think>\n\n"}
    assert apply_chat_template({"prompt": [QUESTION]}, tokenizer, enable_thinking=False) == alone
    del row["completion"]
    assert apply_chat_template(row, tokenizer) == alone


def test_tools_are_described_to_the_model() -> None:
    def add(a: int) -> int:
        """Adds one.

        Args:
            a: A number.
        """
        return a + 1

    tokenizer = chat_tokenizer("{{ tools[0].function.name }}|{{ messages[0].content }}")
    assert apply_chat_template({"messages": [QUESTION]}, tokenizer, tools=[add]) == {"text": "add|sky?"}


def test_rows_of_text_stay_as_they_are() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    row = {"prompt": "sky?", "id": 1}
    assert maybe_apply_chat_template(row, tokenizer) is row
    assert maybe_apply_chat_template({"prompt": [QUESTION]}, tokenizer) == {"prompt": ASKED + HEADER}


def test_columns_that_make_no_conversation_are_refused() -> None:
    row = {"prompt": [QUESTION], "completion": [GOOD], "chosen": [GOOD]}
    with pytest.raises(DataError, match=r"columns \['chosen', 'completion', 'prompt'\]: a chat template needs"):
        apply_chat_template(row, chat_tokenizer(templates.CHATML))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_images_stand_before_the_first_question() -> None:
    messages = [{"role": "system", "content": "Be kind."}, QUESTION, GOOD, QUESTION]
    before = copy.deepcopy(messages)
    assert prepare_multimodal_messages(messages, images=["A", "B"]) == [
        {"role": "system", "content": [text_part("Be kind.")]},
        {"role": "user", "content": [*({"type": "image", "image": i} for i in "AB"), text_part("sky?")]},
        {"role": "assistant", "content": [text_part("blue")]},
        {"role": "user", "content": [text_part("sky?")]},
    ]
    assert messages == before


def test_images_fill_the_places_that_have_none() -> None:
    parts = [{"type": "image", "image": "own"}, {"type": "image"}, text_part("a"), {"type": "image"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    first, *rest = prepare_multimodal_messages([{"role": "user", "content": parts}, call], images=["A", "B"])
    assert [part.get("image") for part in first["content"]] == ["own", "A", None, "B"]
    assert rest == [call]
    assert parts[1] == {"type": "image"}


@pytest.mark.parametrize(
    ("messages", "images", "message"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], ["A", "B"], "2 images for 1 places"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "0 images for 1 places"),
        ([GOOD], ["A"], "1 images for 0 places"),
        ([{"role": "human", "content": "a"}], None, "role 'human': must be one of system, user"),
    ],
)
def test_images_without_places_are_refused(messages: list[dict[str, Any]], images: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_multimodal_messages(messages, images)
