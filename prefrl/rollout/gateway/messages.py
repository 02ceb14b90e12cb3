"""The wire format of Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prefrl.data.formats import Message
from prefrl.rollout.gateway.formats import (
    Asked,
    Body,
    ContextOverflow,
    Event,
    Reply,
    RequestError,
    WireFormat,
    call_message,
    given,
    kind_of,
    limit_of,
    needed,
    objects,
    schema,
    stops_of,
    text_of,
    tool_message,
)

_SAMPLING = ("temperature", "top_p", "top_k", "thinking", "output_config")
_REFUSED = ("mcp_servers", "container")


def _read(body: Body) -> Asked:
    _check(body)
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    for where, message in objects(body.get("messages"), "messages"):
        messages += _messages(message, messages, where)
    tools = []
    for where, tool in objects(body.get("tools") or [], "tools"):
        if tool.get("type", "custom") not in ("custom", None):
            raise RequestError(f"{where}.type={tool['type']!r:.200}: only tools that the client runs can be called")
        tools.append(schema(tool.get("name"), tool.get("description"), tool.get("input_schema"), where))
    sampling = given(body, _SAMPLING)
    choice = kind_of(body.get("tool_choice"), "tool_choice", "auto")
    if choice == "none":
        tools = []
    elif choice != "auto":
        sampling["tool_choice"] = body["tool_choice"]
    stop = stops_of(body.get("stop_sequences"), "stop_sequences")
    return Asked(messages, tools, limit_of(body.get("max_tokens"), "max_tokens"), stop, sampling)


def _check(body: Body) -> None:
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(f"{name} is not supported: only tools that the client runs can be called")
    options = needed(body.get("output_config") or {}, dict, "output_config")
    if body.get("output_format") or options.get("format"):
        raise RequestError("output_format and output_config.format are not supported: answers are sampled freely")


def _messages(message: dict[str, Any], earlier: list[Message], where: str) -> list[Message]:
    """The messages of one: results of tools stand in those of the user."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role={role!r}: must be user or assistant")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [part for _, part in objects(parts, f"{where}.content")]
    found = [
        tool_message(part.get("tool_use_id"), text_of(part.get("content"), f"{where}.content"), earlier)
        for part in parts
        if part.get("type") == "tool_result"
    ]
    rest = [part for part in parts if part.get("type") not in ("tool_result", "redacted_thinking")]
    if not rest:
        return found
    said = [part for part in rest if part.get("type") not in ("tool_use", "thinking")]
    own: Message = {"role": role, "content": text_of(said, f"{where}.content")}
    thoughts = "".join(str(part.get("thinking", "")) for part in rest if part.get("type") == "thinking")
    calls = [
        call_message(part.get("id"), part.get("name"), needed(part.get("input"), dict, f"{where}.input"), where)
        for part in rest
        if part.get("type") == "tool_use"
    ]
    if thoughts:
        own["reasoning_content"] = thoughts
    if calls:
        own["tool_calls"] = calls
    return [*found, own]


def _write(reply: Reply, body: Body) -> dict[str, Any]:
    usage = {"input_tokens": reply.num_sent, "output_tokens": reply.num_sampled}
    return {**_base(reply, body), "content": _content(reply), **_ending(reply), "usage": usage}


def _events(reply: Reply, body: Body) -> Iterator[Event]:
    begun = {"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": reply.num_sent, "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": {**_base(reply, body), "content": [], **begun}}
    for index, block in enumerate(_content(reply)):
        empty, delta = _opened(block)
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    usage = {"input_tokens": reply.num_sent, "output_tokens": reply.num_sampled}
    yield "message_delta", {"type": "message_delta", "delta": _ending(reply), "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block before its content, and the event that brings the content."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _base(reply: Reply, body: Body) -> dict[str, Any]:
    model = str(body.get("model") or "policy")
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": model}


def _content(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"] or not (reply.calls or blocks):
        blocks.append({"type": "text", "text": message["content"]})
    for call in reply.calls:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append(block)
    return blocks


def _ending(reply: Reply) -> dict[str, Any]:
    if reply.ending == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.ending == "stop_string":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    return {"stop_reason": "tool_use" if reply.calls else "end_turn", "stop_sequence": None}


_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def _error(error: RequestError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = str(error)
    if isinstance(error, ContextOverflow):  # as Anthropic words it
        text = f"prompt is too long: {error.num_tokens} tokens > {error.limit - 1} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}}


MESSAGES = WireFormat(_read, _write, _events, _error)
