"""The wire format of OpenAI's `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from prefrl.data.formats import Message
from prefrl.rollout.gateway.formats import (
    Asked,
    Body,
    Event,
    Reply,
    RequestError,
    WireFormat,
    arguments_of,
    call_message,
    given,
    kind_of,
    limit_of,
    needed,
    objects,
    of_calls,
    openai_error,
    schema,
    text_of,
    tool_message,
)

_SAMPLING = ("temperature", "top_p", "reasoning")
_REFUSED = ("previous_response_id", "conversation", "prompt", "background")


def _read(body: Body) -> Asked:
    _check(body)
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for where, item in objects(items, "input"):
        _add(item, messages, where)
    tools = []
    for where, tool in objects(body.get("tools") or [], "tools"):
        if tool.get("type") != "function":
            raise RequestError(f"{where}.type={tool.get('type')!r:.200}: must be 'function'")
        tools.append(schema(tool.get("name"), tool.get("description"), tool.get("parameters"), where))
    sampling = given(body, _SAMPLING) | given(body.get("text") or {}, ("verbosity",))
    if body.get("tool_choice") == "none":
        tools = []
    sampling |= of_calls(body)
    return Asked(messages, tools, limit_of(body.get("max_output_tokens"), "max_output_tokens"), (), sampling)


def _check(body: Body) -> None:
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(f"{name} is not supported: send the whole conversation as input")
    if body.get("top_logprobs"):
        raise RequestError("logprobs are not returned: leave top_logprobs out")
    kind = kind_of(needed(body.get("text") or {}, dict, "text").get("format"), "text.format", "text")
    if kind != "text":
        raise RequestError(f"text.format.type={kind!r}: must be 'text', because answers are sampled freely")


def _add(item: dict[str, Any], messages: list[Message], where: str) -> None:
    """Add an item of the input. Items of one turn of the assistant become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            raise RequestError(f"{where}.role={role!r}: must be system, developer, user or assistant")
        content = text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            _turn(messages)["content"] += content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn = _turn(messages)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text_of(parts, f"{where}.content")
    elif kind == "function_call":
        arguments = arguments_of(item.get("arguments"), f"{where}.arguments")
        _turn(messages).setdefault("tool_calls", []).append(
            call_message(item.get("call_id"), item.get("name"), arguments, where)
        )
    elif kind == "function_call_output":
        messages.append(tool_message(item.get("call_id"), text_of(item.get("output"), f"{where}.output"), messages))
    else:
        raise RequestError(f"{where}.type={kind!r}: must be message, reasoning, function_call or function_call_output")


def _turn(messages: list[Message]) -> Message:
    """The assistant's message at the end of the conversation, which is added if it is not there."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _write(reply: Reply, body: Body) -> dict[str, Any]:
    is_cut = reply.ending == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": str(body.get("model") or "policy"),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": _output(reply),
        "usage": _usage(reply),
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
    }


def _events(reply: Reply, body: Body) -> Iterator[Event]:
    numbers, whole = count(), _write(reply, body)

    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **data}

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=_begun(item))
        if item["type"] == "message":
            (part,) = item["content"]
            yield event("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            yield event("response.output_text.delta", **place, content_index=0, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, content_index=0, part=part)
        elif item["type"] == "reasoning":
            (thought,) = item["content"]
            yield event("response.reasoning_text.delta", **place, content_index=0, delta=thought["text"])
            yield event("response.reasoning_text.done", **place, content_index=0, text=thought["text"])
        else:
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item before its content."""
    own: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **own, "status": "in_progress"}


def _output(reply: Reply) -> list[dict[str, Any]]:
    message, output = reply.message, []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
    if message["content"] or not (reply.calls or output):
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant"}
        output.append({**item, "status": "completed", "content": [part]})
    for call in reply.calls:
        function = call["function"]
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"]),
                "status": "completed",
            }
        )
    return output


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_sent,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_sampled,
        "output_tokens_details": {"reasoning_tokens": reply.num_thought},
        "total_tokens": reply.num_sent + reply.num_sampled,
    }


RESPONSES = WireFormat(_read, _write, _events, openai_error)
