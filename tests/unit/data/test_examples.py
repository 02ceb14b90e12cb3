"""Helpers for single rows, with results worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prefrl.data.chat_templates import (
    apply_chat_template,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
)
from prefrl.errors import DataError
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

ASK = {"role": "user", "content": "sky?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("blue", "red"))
# In the template CHATML.
ASKED = "<|im_start|>user\nsky?<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "is_conversation"),
    [
        *(({name: [ASK]}, True) for name in ("prompt", "chosen", "rejected", "completion", "messages")),
        ({"prompt": "sky?"}, False),
        ({"prompt": []}, False),
        ({"prompt": [{"content": "no role"}]}, False),
        ({"prompt": ["sky?"]}, False),
        ({"other": [ASK]}, False),
        ({"conversations": [{"from": "human", "value": "sky?"}]}, False),
    ],
)
def test_a_row_is_conversational_if_a_column_holds_messages_with_roles(
    row: dict[str, Any], is_conversation: bool
) -> None:
    assert is_conversational(row) is is_conversation


def test_messages_written_as_from_and_value_are_told_apart() -> None:
    assert is_conversational_from_value({"conversations": [{"from": "human", "value": "a"}]})
    for row in ({"conversations": [ASK]}, {"conversations": "a"}, {"conversations": []}, {"messages": [ASK]}):
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
    row = {"prompt": [ASK], "completion": [GOOD], "label": True, "id": 1}
    text = {"prompt": ASKED + HEADER, "completion": "blue<|im_end|>\n", "label": True}
    assert apply_chat_template(row, tokenizer) == text
    pair = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    sides = {"chosen": "blue<|im_end|>\n", "rejected": "red<|im_end|>\n"}
    assert apply_chat_template(pair, tokenizer) == {"prompt": ASKED + HEADER, **sides}
    implicit = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    whole = {name: ASKED + HEADER + side for name, side in sides.items()}
    assert apply_chat_template(implicit, tokenizer) == whole
    assert apply_chat_template({"messages": [ASK, GOOD]}, tokenizer) == {"text": whole["chosen"]}


def test_a_prompt_that_the_assistant_began_is_left_open() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    assert apply_chat_template({"prompt": [ASK, GOOD]}, tokenizer) == {"prompt": ASKED + HEADER + "blue"}


def test_a_prompt_ends_where_the_conversation_goes_on_otherwise() -> None:
    # Without thinking, the prompt ends with an empty block, which the whole conversation does not have.
    tokenizer = chat_tokenizer(templates.THINKING)
    row = {"prompt": [ASK], "completion": [GOOD], "chat_template_kwargs": {"enable_thinking": False}}
    text = apply_chat_template(row, tokenizer)
    assert text == {"prompt": ASKED + HEADER, "completion": "blue<|im_end|>\n"}
    alone = {"prompt": ASKED + HEADER + "<think>\n\n</think>\n\n"}
    assert apply_chat_template({"prompt": [ASK]}, tokenizer, enable_thinking=False) == alone
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
    assert apply_chat_template({"messages": [ASK]}, tokenizer, tools=[add]) == {"text": "add|sky?"}


def test_rows_of_text_stay_as_they_are() -> None:
    tokenizer = chat_tokenizer(templates.CHATML)
    row = {"prompt": "sky?", "id": 1}
    assert maybe_apply_chat_template(row, tokenizer) is row
    assert maybe_apply_chat_template({"prompt": [ASK]}, tokenizer) == {"prompt": ASKED + HEADER}


def test_columns_that_make_no_conversation_are_refused() -> None:
    row = {"prompt": [ASK], "completion": [GOOD], "chosen": [GOOD]}
    with pytest.raises(DataError, match=r"columns \['chosen', 'completion', 'prompt'\]: a chat template needs"):
        apply_chat_template(row, chat_tokenizer(templates.CHATML))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_images_stand_before_the_first_question() -> None:
    messages = [{"role": "system", "content": "Be kind."}, ASK, GOOD, ASK]
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
