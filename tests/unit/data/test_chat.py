from __future__ import annotations

import pytest
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
from prefrl.errors import DataError
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

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
