"""Requests as they are read or refused, and the events of streamed answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefrl.rollout.gateway.chat import CHAT
from prefrl.rollout.gateway.formats import Asked, Ending, Reply, RequestError, WireFormat
from prefrl.rollout.gateway.messages import MESSAGES
from prefrl.rollout.gateway.responses import RESPONSES

SEARCH = {"type": "object", "properties": {"q": {"type": "string"}}}
CALL = {"type": "function", "id": "c00010000", "function": {"name": "search", "arguments": {"q": "cat"}}}
# The same conversation, as each of the formats has it.
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Find a cat."},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "A cat?", "tool_calls": [CALL]},
    {"role": "tool", "name": "search", "content": "found", "tool_call_id": "c00010000"},
    {"role": "user", "content": "Thanks."},
]
ARGUMENTS = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]
REQUESTS: dict[str, tuple[WireFormat, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "Find a cat."},
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "reasoning_content": "A cat?",
                    "refusal": None,
                    "tool_calls": [{**CALL, "function": {"name": "search", "arguments": ARGUMENTS}}],
                },
                {"role": "tool", "tool_call_id": "c00010000", "content": [{"type": "text", "text": "found"}]},
                {"role": "user", "content": "Thanks."},
            ],
            "tools": [
                {"type": "function", "function": {"name": "search", "description": "It.", "parameters": SEARCH}}
            ],
            "max_completion_tokens": None,
            "max_tokens": 9,
            "stop": "END",
            "temperature": 0.5,
            "parallel_tool_calls": False,
            "tool_choice": "required",
            "response_format": {"type": "text"},
            "stream_options": {"include_usage": True},
        },
    ),
    "messages": (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Find a cat."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "A cat?", "signature": ""},
                        {"type": "text", "text": "Yes."},
                        {"type": "tool_use", "id": "c00010000", "name": "search", "input": {"q": "cat"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c00010000", "content": "found"},
                        {"type": "text", "text": "Thanks."},
                    ],
                },
            ],
            "tools": [{"name": "search", "description": "It.", "input_schema": SEARCH}],
            "max_tokens": 9,
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "tool_choice": {"type": "any"},
        },
    ),
    "responses": (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Find a cat."}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "A cat?"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
                {"type": "function_call", "call_id": "c00010000", "name": "search", "arguments": ARGUMENTS},
                {"type": "function_call_output", "call_id": "c00010000", "output": "found"},
                {"type": "message", "role": "user", "content": "Thanks."},
            ],
            "tools": [{"type": "function", "name": "search", "description": "It.", "parameters": SEARCH}],
            "max_output_tokens": 9,
            "temperature": 0.5,
            "tool_choice": "required",
            "text": {"format": {"type": "text"}},
        },
    ),
}
FORMATS = pytest.mark.parametrize("name", REQUESTS)


@FORMATS
def test_all_formats_say_the_same(name: str) -> None:
    form, body = REQUESTS[name]
    asked = form.read(body)

    assert asked.messages == CONVERSATION
    function = {"name": "search", "description": "It.", "parameters": SEARCH}
    assert asked.tools == [{"type": "function", "function": function}]
    assert asked.max_tokens == 9
    assert asked.stop == (() if name == "responses" else ("END",))
    assert asked.sampling["temperature"] == 0.5
    assert "tool_choice" in asked.sampling
    assert form.read({**body, "tool_choice": {"type": "none"} if name == "messages" else "none"}).tools == []


OVERRULED = {
    "chat": {
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": 1,
        "logit_bias": {"1": 5},
        "seed": 3,
        "reasoning_effort": "low",
        "verbosity": "low",
        "repetition_penalty": 1.5,
        "length_penalty": 2.0,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "tools": [{"type": "function", "function": {"name": "search", "strict": True}}],
    },
    "messages": {
        "top_p": 0.5,
        "top_k": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "tool_choice": {"type": "tool", "name": "search"},
    },
    "responses": {
        "top_p": 0.5,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "search"},
        "tools": [{"type": "function", "name": "search", "strict": True}],
    },
}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OVERRULED for option in OVERRULED[name]])
def test_options_that_would_change_the_distribution_are_told(name: str, option: str) -> None:
    form, body = REQUESTS[name]
    bare = {key: value for key, value in body.items() if key in ("messages", "input")}
    assert form.read(bare).sampling == {}
    value = OVERRULED[name][option]
    told = {"tools": ("strict", True), "text": ("verbosity", "low")}.get(option, (option, value))
    assert form.read({**bare, option: value}).sampling == dict([told])


NONSENSE = st.sampled_from([None, True, 0, -1, 1.5, "", "x", [], {}, [None], [1], [{}], {"type": 7}, {"type": []}])


@st.composite
def broken(draw: Any) -> tuple[WireFormat, dict[str, Any]]:
    """A request with nonsense at any places."""
    form, body = draw(st.sampled_from([*REQUESTS.values()]))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([*_places(body)]))
        where[0][where[1]] = copy.deepcopy(draw(NONSENSE))
    return form, body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@given(broken())
def test_any_request_is_read_or_refused(case: tuple[WireFormat, dict[str, Any]]) -> None:
    form, body = case
    try:
        asked = form.read(body)
    except RequestError as error:
        json.dumps(form.error(error))
        return
    assert all(isinstance(message["content"], str) for message in asked.messages)
    assert all(isinstance(tool["function"]["name"], str) for tool in asked.tools)
    json.dumps([form.write(reply("stop"), body), *form.events(reply("stop"), body)])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("chat", {"n": 2}, "n=2: must be 1"),
        ("chat", {"logprobs": True}, "logprobs are not returned"),
        ("chat", {"functions": [{}]}, "functions is not supported: use messages and tools"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format.type='json_object': must be 'text'"),
        ("chat", {"messages": "hi"}, "messages='hi': must be a JSON array"),
        ("chat", {"messages": [{"role": "critic", "content": ""}]}, "messages[0].role='critic': must be system, "),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0] is of type 'image_url': only text can be shown to the model",
        ),
        ("chat", {"tools": [{"function": {}}]}, "tools[0].function.name=None: must be a JSON string"),
        ("chat", {"max_tokens": 0}, "max_tokens=0: must be a positive integer"),
        ("chat", {"stop": [1]}, "stop=[1]: must be a string or an array of strings"),
        ("messages", {"tools": [{"type": "bash_20250124"}]}, "tools[0].type='bash_20250124': only tools that the "),
        ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role='tool': must be user or "),
        ("chat", {"guided_regex": "a+"}, "guided_regex is not supported"),
        ("messages", {"mcp_servers": [{}]}, "mcp_servers is not supported: only tools that the client runs "),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_format and output_config.format ",
        ),
        ("messages", {"output_format": {"type": "json_schema"}}, "output_format and output_config.format are not "),
        ("responses", {"top_logprobs": 3}, "logprobs are not returned"),
        ("responses", {"previous_response_id": "r"}, "previous_response_id is not supported: send the whole "),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.type='json_schema': must be "),
        ("responses", {"input": [{"type": "item_reference"}]}, "input[0].type='item_reference': must be message, "),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type='web_search': must be 'function'"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    form, body = REQUESTS[name]
    with pytest.raises(RequestError) as refused:
        form.read({**body, **change})
    assert str(refused.value).startswith(message)


def reply(ending: Ending, **message: Any) -> Reply:
    stop = "END" if ending == "stop_string" else None
    return Reply("00000001", {"role": "assistant", "content": "", **message}, ending, stop, 3, 4, 2, created=0)


REPLIES = [
    reply("stop", content="Hello."),
    reply("stop", tool_calls=[CALL, {**CALL, "id": "c00010001"}], reasoning_content="hm"),
    reply("stop", content="I call.", tool_calls=[CALL]),
    reply("stop_string", content="cut", reasoning_content="hm"),
    reply("length"),
]


@FORMATS
def test_streamed_events_add_up_to_the_answer(name: str) -> None:
    form, body = REQUESTS[name]
    for told in REPLIES:
        text = "".join(_text_of_event(data) for _, data in form.events(told, body) if isinstance(data, dict))
        assert told.message["content"] in text
        for call in told.calls:
            assert json.dumps(call["function"]["arguments"]) in text


def _text_of_event(data: dict[str, Any]) -> str:
    delta = data.get("delta", "")
    if isinstance(delta, str):
        return delta if str(data.get("type", "")).endswith("delta") else _of_choices(data)
    return str(delta.get("text", "") + delta.get("partial_json", ""))


def _of_choices(data: dict[str, Any]) -> str:
    deltas = [choice["delta"] for choice in data.get("choices", ())]
    calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    return "".join([*(delta.get("content") or "" for delta in deltas), *calls])


def test_a_request_needs_nothing_but_messages() -> None:
    assert CHAT.read({"messages": [{"role": "user", "content": "hi"}]}) == Asked([{"role": "user", "content": "hi"}])
