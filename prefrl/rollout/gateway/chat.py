"""The wire format of OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prefrl.data.formats import REASONING_FIELDS, Message
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
    stops_of,
    text_of,
    tool_message,
)

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"),
    *("reasoning_effort", "verbosity"),
    *("repetition_penalty", "length_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),  # of vLLM
)
_REFUSED = (
    *("functions", "function_call", "audio", "prediction", "web_search_options"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # of vLLM
)


def _read(body: Body) -> Asked:
    _check(body)
    messages: list[Message] = []
    for where, message in objects(body.get("messages"), "messages"):
        messages.append(_message(message, messages, where))
    tools = []
    for where, tool in objects(body.get("tools") or [], "tools"):
        own = needed(tool.get("function"), dict, f"{where}.function")
        tools.append(schema(own.get("name"), own.get("description"), own.get("parameters"), f"{where}.function"))
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    sampling = given(body, _SAMPLING)
    if body.get("tool_choice") == "none":
        tools = []
    sampling |= of_calls(body)
    return Asked(messages, tools, limit_of(limit, "max_tokens"), stops_of(body.get("stop"), "stop"), sampling)


def _check(body: Body) -> None:
    if body.get("n") not in (None, 1):
        raise RequestError(f"n={body['n']!r}: must be 1. Send one request for each answer")
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(f"{name} is not supported: use messages and tools")
    kind = kind_of(body.get("response_format"), "response_format", "text")
    if kind != "text":
        raise RequestError(f"response_format.type={kind!r}: must be 'text', because answers are sampled freely")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise RequestError("logprobs are not returned: leave logprobs and top_logprobs out")


def _message(message: dict[str, Any], earlier: list[Message], where: str) -> Message:
    role = message.get("role")
    content = text_of(message.get("content"), f"{where}.content")
    if role == "tool":
        return tool_message(message.get("tool_call_id"), content, earlier)
    found: Message = {"role": "system" if role == "developer" else role, "content": content}
    if found["role"] not in ("system", "user", "assistant"):
        raise RequestError(f"{where}.role={role!r}: must be system, developer, user, assistant or tool")
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning is not None:
        found["reasoning_content"] = needed(reasoning, str, f"{where}.reasoning_content")
    if message.get("tool_calls"):
        calls = objects(message["tool_calls"], f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, place) for place, call in calls]
    return found


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = needed(call.get("function"), dict, f"{where}.function")
    arguments = arguments_of(function.get("arguments"), f"{where}.function.arguments")
    return call_message(call.get("id"), function.get("name"), arguments, f"{where}.function")


def _write(reply: Reply, body: Body) -> dict[str, Any]:
    choice = {"index": 0, "message": _answer(reply), "finish_reason": _finish(reply), "logprobs": None}
    return {**_base(reply, body, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _events(reply: Reply, body: Body) -> Iterator[Event]:
    chunk = _base(reply, body, "chat.completion.chunk")
    delta = _answer(reply)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    yield None, {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield None, {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield None, {**chunk, "choices": [], "usage": _usage(reply)}
    yield None, "[DONE]"


def _base(reply: Reply, body: Body, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": _model(body)}


def _model(body: Body) -> str:
    return str(body.get("model") or "policy")


def _answer(reply: Reply) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.calls
    ]
    answer = {**reply.message, "content": reply.message["content"] or (None if calls else "")}
    return {**answer, "tool_calls": calls} if calls else answer


def _finish(reply: Reply) -> str:
    return "length" if reply.ending == "length" else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_sent,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_sent + reply.num_sampled,
        "completion_tokens_details": {"reasoning_tokens": reply.num_thought},
    }


CHAT = WireFormat(_read, _write, _events, openai_error)
