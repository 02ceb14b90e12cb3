"""What an agent is given to ask with; and what the wire formats of chat APIs have in common.

That is what is asked for, what is answered, and errors. Other than the server, this needs no package of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prefrl.data.formats import Message
from prefrl.data.tools import Schema
from prefrl.errors import EpisodeError

MODEL = "policy"  # the name of the only model

Body = Mapping[str, Any]
# The name of a streamed event, or None, and its data; a text is sent as it is.
Event = tuple[str | None, "dict[str, Any] | str"]
Ending = Literal["stop", "stop_string", "length"]


@dataclass(frozen=True)
class Client:
    """What an agent needs to ask the policy."""

    root: str  # the URL without a path, as Anthropic's client takes it
    api_key: str = field(repr=False)  # of this episode
    model: str = MODEL
    credit: Callable[[float], None] | None = field(default=None, repr=False, compare=False)

    def reward(self, value: float) -> None:
        """Add to the reward of the policy's last turn. The episode's is the sum of these and what the agent returns.

        Args:
            value: `turn_credit` says what it means for the turns before.
        Raises:
            EpisodeError: The policy has not answered yet, or the value is not finite.
        """
        if self.credit is None:
            raise EpisodeError("client.reward: nothing is learned from this client's answers")
        self.credit(value)

    @property
    def base_url(self) -> str:
        """The URL as OpenAI's client takes it."""
        return f"{self.root}/v1"

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.root, "api_key": self.api_key}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that clients read, and an identifier of the episode."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.api_key,
            "PREFRL_SESSION": hashlib.sha256(self.api_key.encode()).hexdigest()[:16],
        }


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        message: What is wrong and what is allowed.
        status: Of HTTP.
        code: For programs, where a format has one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EpisodeOver(RequestError):
    """A request with the key of an episode that is over."""

    def __init__(self) -> None:
        super().__init__("the episode of this key is over", status=410)


class ContextOverflow(RequestError):
    """A conversation that leaves no room for an answer. Its text is OpenAI's, from which frameworks know it.

    Args:
        num_tokens: Of the request.
        limit: Tokens of a request and its answer.
    """

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {num_tokens} "
            "tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.limit = limit


@dataclass(frozen=True)
class Asked:
    """A request for a turn, in the terms of chat templates."""

    messages: list[Message]
    tools: list[Schema] = field(default_factory=list)
    max_tokens: int | None = None  # None: as many as fit
    stop: tuple[str, ...] = ()  # texts at which the answer ends
    sampling: Mapping[str, Any] = field(default_factory=dict)  # options that would change the distribution


@dataclass(frozen=True)
class Reply:
    """A turn as a client sees it."""

    id: str  # unique among the replies of a session
    message: Message
    ending: Ending
    stop_string: str | None  # that ended it
    num_sent: int  # tokens
    num_sampled: int  # tokens
    num_thought: int  # of these, tokens up to the end of the thinking
    created: int  # seconds since 1970

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls of the message."""
        return list(self.message.get("tool_calls") or ())


@dataclass(frozen=True)
class WireFormat:
    """A chat API: how its requests are read and answered. All functions are pure."""

    read: Callable[[Body], Asked]  # raises RequestError
    write: Callable[[Reply, Body], dict[str, Any]]
    events: Callable[[Reply, Body], Iterator[Event]]  # of a streamed answer
    error: Callable[[RequestError], dict[str, Any]]


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a text, or parts of type text.

    Raises:
        RequestError: There is a part of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"text": part} if isinstance(part, str) else part for part in needed(content, list, where)]
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where}[{number}] is of type {kind!r}: only text can be shown to the model")
    return "".join(part["text"] for part in parts)


def arguments_of(text: Any, where: str) -> dict[str, Any]:
    """The arguments of a tool call that a client sends back as JSON text.

    Raises:
        RequestError: It is no JSON object.
    """
    try:
        arguments = json.loads(text or "{}") if isinstance(text, str | None) else text
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}={text!r:.200}: must be a JSON object")
    return arguments


def call_message(call_id: Any, name: Any, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call inside a message.

    Raises:
        RequestError: It names no tool.
    """
    function = {"name": needed(name, str, f"{where}.name"), "arguments": dict(arguments)}
    return {"type": "function", "id": str(call_id), "function": function}


def tool_message(call_id: Any, content: str, earlier: Sequence[Message]) -> Message:
    """The result of a tool, with the name of the tool that the call of this id has."""
    calls = [call for message in earlier for call in message.get("tool_calls") or ()]
    name = next((call["function"]["name"] for call in reversed(calls) if call["id"] == call_id), None)
    message: Message = {"role": "tool"} if name is None else {"role": "tool", "name": name}
    return {**message, "content": content, "tool_call_id": str(call_id)}


def schema(name: Any, description: Any, parameters: Any, where: str) -> Schema:
    """A tool as chat templates read it.

    Raises:
        RequestError: It has no name, or its parameters are no JSON schema.
    """
    function: dict[str, Any] = {"name": needed(name, str, f"{where}.name")}
    if description is not None:
        function["description"] = str(description)
    function["parameters"] = needed(parameters or {"type": "object", "properties": {}}, dict, f"{where}.parameters")
    return {"type": "function", "function": function}


def objects(values: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in an array, each with the name of its place.

    Raises:
        RequestError: It is something else.
    """
    for number, value in enumerate(needed(values, list, where)):
        yield f"{where}[{number}]", needed(value, dict, f"{where}[{number}]")


def kind_of(value: Any, where: str, default: str) -> Any:
    """The type of an object that may be left out.

    Raises:
        RequestError: It is no object.
    """
    return default if value is None else needed(value, dict, where).get("type", default)


def needed(value: Any, kind: type, where: str) -> Any:
    """The value.

    Raises:
        RequestError: It is of another type.
    """
    if not isinstance(value, kind):
        raise RequestError(f"{where}={value!r:.200}: must be a JSON {_JSON_NAMES[kind]}")
    return value


def openai_error(error: RequestError) -> dict[str, Any]:
    """An error as OpenAI's APIs tell it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


_JSON_NAMES = {list: "array", dict: "object", str: "string", int: "number"}


def limit_of(value: Any, where: str) -> int | None:
    """A number of tokens, or None.

    Raises:
        RequestError: It is no positive integer.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{where}={value!r}: must be a positive integer")
    return value


def stops_of(value: Any, where: str) -> tuple[str, ...]:
    """Texts at which an answer ends.

    Raises:
        RequestError: It is neither a text nor a list of texts.
    """
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"{where}={value!r:.200}: must be a string or an array of strings")
    return tuple(one for one in found if one)


def given(body: Body, names: Sequence[str]) -> dict[str, Any]:
    """The options of these names that a request sets."""
    return {name: body[name] for name in names if body.get(name) is not None}


def of_calls(body: Body) -> dict[str, Any]:
    """The options of a request to an API of OpenAI that would change which calls are sampled."""
    options = {"tool_choice": (None, "auto", "none"), "parallel_tool_calls": (None, True)}
    found = {name: body[name] for name, same in options.items() if body.get(name) not in same}
    if any((tool.get("function") or tool).get("strict") for tool in body.get("tools") or ()):
        found["strict"] = True
    return found
