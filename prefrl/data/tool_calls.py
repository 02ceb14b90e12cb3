"""Read the tool calls of an assistant's turn from its sampled text.

Calls are read with response templates of transformers. Which of them fits a model is proven, not told by its name: a
known call is rendered with the model's chat template, and a format is used only if it reads the same call back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from prefrl.data.chat import ChatTemplate, common_prefix_length
from prefrl.data.formats import REASONING_FIELDS, Message
from prefrl.data.tools import CALLS, TEXT, Schema, call_problem, known_formats
from prefrl.errors import ConfigError, printable, reason_of
from prefrl.options.names import nearest

# The option `tool_parser`: the name of a format, a response template, or a function that makes a message of a text.
ToolParser = str | Mapping[str, Any] | Callable[[str], "Message"]

_TOOL, _ASKED, _SAID = "prefrl_probe", "prefrlProbeQuestion", "prefrlProbeText"
# One argument of each JSON type, except null. Digits in a text must not become a number.
_SAMPLES: Mapping[str, Any] = {
    "string": "75001",
    "integer": 3,
    "number": 0.5,
    "boolean": True,
    "array": ["a", "b"],
    "object": {"key": "c"},
}
_FIRST, _SECOND = "first words", "second words"  # an argument of the first call of a turn and of the second
_TAG = re.compile(r"<[^<>/\s][^<>\s]*>|\[[A-Z_]+\]")
_LONG_SPACE = re.compile(r"(\s{1000})\s+")
_OPEN_TAG = re.compile(r"<[^<>\s]*$")
# Characters that the parser is fed at once. After each call it searches them again, so the whole text at once would
# cost the square of the number of calls.
_NUM_FED = 512
_MAX_PROMPT_END = 256  # characters of a prompt in which a turn may have been opened


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str  # empty if it cannot be read
    arguments: Mapping[str, Any]
    problem: str | None = None  # why the tool cannot be run, in words that can be told to the model


@dataclass(frozen=True)
class ParsedTurn:
    """What the model wrote in one turn, without thinking, tags and the token that ends the turn."""

    text: str  # around the calls
    calls: tuple[ToolCall, ...]  # in the order of writing; empty: the turn calls no tool
    reasoning: str = ""


@dataclass(frozen=True)
class _Format:
    """A response template, and how values get their types."""

    name: str
    template: Any  # a response template as transformers loads it
    unread: Any  # the same with all calls left as text
    is_typed: bool = True  # whether values have their types in the text; else they get those of the schema

    def message(self, text: str, prompt: str, tools: list[Schema]) -> Message:
        return self._parse(self.template, text, prompt, tools)

    def without_calls(self, text: str, prompt: str) -> Message:
        """The message of a turn whose calls cannot be read."""
        try:
            return {**self._parse(self.unread, text, prompt, []), CALLS: None}
        except Exception:  # a user's template may read other fields as JSON, or require some
            return {TEXT: text}

    def _parse(self, template: Any, text: str, prompt: str, tools: list[Schema]) -> Message:
        parser = ResponseParser(template, self._left_open(prompt), tools=None if self.is_typed else tools)
        for start in range(0, len(text), _NUM_FED):
            parser.feed(text[start : start + _NUM_FED])
        message: Message = parser.finalize()[0]
        return message

    def _left_open(self, prompt: str) -> str:
        """The end of a prompt that opens thinking or a call, which the response goes on with."""
        end = prompt[-_MAX_PROMPT_END:]
        patterns = [field.open_re for field in self.template.fields.values() if field.open_re is not None]
        matches = (match for pattern in patterns for match in pattern.finditer(end))
        return next((end[m.start() :] for m in matches if m.group() and not end[m.end() :].strip()), "")


@dataclass(frozen=True)
class ToolCallReader:
    """Reads turns of one model. Made by `tool_call_reader`."""

    format: _Format | Callable[[str], Message]
    schemas: Mapping[str, Schema]
    ends: tuple[str, ...] = ()  # tokens that may end a turn
    openings: tuple[str, ...] = ()  # tags that stand only where a call starts

    @property
    def name(self) -> str:
        """The format: its name, or how the user gave it."""
        return self.format.name if isinstance(self.format, _Format) else "tool_parser"

    def read(self, text: str, *, prompt: str) -> ParsedTurn:
        """The text and the calls of a turn.

        Nothing that a model can write raises an error. Calls that cannot be read or run have a `problem`.

        Args:
            text: The sampled tokens, decoded with special tokens. The token that ends the turn may be missing.
            prompt: What was sent to the sampler. Only its last 256 characters are looked at: they may open the model's
                thinking, which the text then goes on with.

        Raises:
            ConfigError: `tool_parser` is a function and returned something that is not a message.
        """
        if not isinstance(self.format, _Format):
            return self._read_by_function(self.format, text)
        text = self._without_end(text)
        try:
            turn = self._turn(self.format.message(text, prompt, list(self.schemas.values())))
        except Exception as error:  # a broken call; what it raises depends on the format
            turn = self._turn(self.format.without_calls(text, prompt))
            return replace(turn, calls=(_unreadable(reason_of(error.__cause__ or error)),))
        if turn.calls:
            return turn
        if self.format.template.implicit is None and not turn.text and not turn.reasoning:
            turn = replace(turn, text=text)  # else all that is in no known part of a turn would be lost
        opening = next((tag for tag in self.openings if tag in turn.text), None)
        problem = None if opening is None else _unreadable(f"no call in the right format follows {opening}")
        return turn if problem is None else replace(turn, calls=(problem,))

    def _read_by_function(self, function: Callable[[str], Message], text: str) -> ParsedTurn:
        try:
            message = function(text)
        except Exception as error:  # user code, which need not handle broken calls itself
            return ParsedTurn(text, (_unreadable(reason_of(error)),))
        if not isinstance(message, Mapping):
            raise ConfigError(
                f"tool_parser: the function returned {type(message).__name__}: must be a message, such as "
                '{"content": "...", "tool_calls": [{"function": {"name": "...", "arguments": {...}}}]}'
            )
        try:
            return self._turn(message)
        except Exception as error:  # calls without names, arguments that are not JSON
            return ParsedTurn(_text_of(message, TEXT), (_unreadable(reason_of(error)),))

    def _turn(self, message: Message) -> ParsedTurn:
        written = [_name_and_arguments(call) for call in _calls_of(message.get(CALLS))]
        calls = tuple(ToolCall(name, given, call_problem(name, given, self.schemas)) for name, given in written)
        reasoning = next(filter(None, (_text_of(message, field) for field in REASONING_FIELDS)), "")
        return ParsedTurn(_text_of(message, TEXT), calls, reasoning)

    def _without_end(self, text: str) -> str:
        # Formats of transformers take time in the square of a run of spaces.
        text = _LONG_SPACE.sub(r"\1", text.rstrip())
        end = next((end for end in self.ends if text.endswith(end)), "")
        return text.removesuffix(end).rstrip()


def tool_call_reader(
    template: ChatTemplate, schemas: Mapping[str, Schema], *, tool_parser: ToolParser | None = None
) -> ToolCallReader:
    """Find how a model writes tool calls.

    A format must read back what the chat template renders: one call and two, with and without text beside them, with
    arguments of all JSON types that the tools use. What a template does not render need not be read.

    Args:
        template: The model's, with the options of the run.
        schemas: The tools by name, as `tool_schemas` returns them.
        tool_parser: None: the tokenizer's `response_template`, or else the first known format that passes. The name
            of a format, or a response template: this one, if it passes. A function of the sampled text, which
            returns a message with `content` and `tool_calls`: used as it is.

    Raises:
        ConfigError: The template renders no calls, no format passes, or `tool_parser` is not one of the above.
    """
    if tool_parser is not None and not isinstance(tool_parser, str | Mapping):
        if not callable(tool_parser):
            raise ConfigError(f"tool_parser={tool_parser!r}: must be None, {_REMEDIES}")
        return ToolCallReader(tool_parser, schemas)
    formats = _candidates(template, tool_parser)
    probe = _probe(_used_types(list(schemas.values())))
    proofs = list(_proofs(replace(template, tools=[probe]), probe))
    if not proofs:
        raise ConfigError(
            f"the chat template of {template.name!r} renders no tool calls, so no format can be verified. Use a model "
            "whose chat template does, or set tool_parser to a function and explain in the prompt how to call tools"
        )
    # Types that stand in the text are believed first: then a text in the place of a number is an error to tell of.
    for known, is_typed, turns in product(formats, (True, False), proofs):
        reader = ToolCallReader(replace(known, is_typed=is_typed), {_TOOL: probe}, template.special_tokens)
        if all(turn.is_read_by(reader) for turn in turns):
            return replace(reader, schemas=schemas, openings=_openings(template, turns))
    raise ConfigError(_no_format_message(template, tool_parser, proofs[0][0]))


_REMEDIES = (
    "the name of a format, a response template of transformers, or a function that is given the sampled text and "
    "returns a message with 'content' and 'tool_calls'"
)


@dataclass(frozen=True)
class _ProofTurn:
    """A turn as the chat template renders it, and what must be read."""

    prompt: str
    response: str
    text: str
    calls: tuple[ToolCall, ...]

    def is_read_by(self, reader: ToolCallReader) -> bool:
        turn = reader.read(self.response, prompt=self.prompt)
        return turn.calls == self.calls and self.text == (turn.text or turn.reasoning)


def _candidates(template: ChatTemplate, tool_parser: str | Mapping[str, Any] | None) -> list[_Format]:
    if isinstance(tool_parser, Mapping):
        return [_loaded("tool_parser", tool_parser)]
    formats = known_formats()
    if isinstance(tool_parser, str):
        if tool_parser not in formats:
            raise ConfigError(
                f"tool_parser={tool_parser!r} is no known format. {nearest(tool_parser, formats)} Set it to None, "
                f"{_REMEDIES}"
            )
        return [_loaded(tool_parser, formats[tool_parser])]
    own = getattr(template.tokenizer, "response_template", None) or {}
    distinct = {id(known): (name, known) for name, known in reversed(formats.items())}
    found = [_loaded(name, known) for name, known in reversed(distinct.values())]
    return [_loaded("tokenizer.response_template", own), *found] if CALLS in own.get("fields", {}) else found


def _loaded(name: str, response_template: Mapping[str, Any]) -> _Format:
    try:
        fields = {**response_template["fields"]}
        if fields.get(TEXT, {}).get("content") == "text":  # all text of a turn, not only that behind the last call
            fields[TEXT] = {"repeats": True, "join": "\n", **fields[TEXT]}
        calls = {key: value for key, value in fields[CALLS].items() if key not in ("content_args", "transform_each")}
        unread = {**fields, CALLS: {**calls, "content": "text", "transform": {}}}
        read, unread = ({**response_template, "fields": those} for those in (fields, unread))
        return _Format(name, load_response_template(read), load_response_template(unread))
    except Exception as error:  # a missing key or an invalid pattern, of the tokenizer's or the user's own template
        raise ConfigError(
            f"{name} is not a response template with the field {CALLS!r}: {reason_of(error)}. Correct it, "
            f"or set tool_parser to {_REMEDIES}"
        ) from error


def _used_types(schema: Any) -> set[str]:
    """All JSON types that schemas name, at any depth."""
    if isinstance(schema, Mapping):
        named = schema.get("type")
        here = {named} if isinstance(named, str) else {one for one in named or () if isinstance(one, str)}
        return here.union(*map(_used_types, schema.values()))
    return set().union(*map(_used_types, schema)) if isinstance(schema, list) else set()


def _probe(types: set[str]) -> Schema:
    """The schema of a tool with an argument of each type, and a text that tells its calls apart."""
    names = {"words": "string"} | {f"{name}_value": name for name in _SAMPLES if name in types}
    properties = {argument: {"type": name, "description": "Any value."} for argument, name in names.items()}
    parameters = {"type": "object", "properties": properties, "required": ["words"]}
    return {
        "type": "function",
        "function": {"name": _TOOL, "description": "Takes values.", "parameters": parameters},
    }


def _proofs(template: ChatTemplate, probe: Schema) -> Iterator[list[_ProofTurn]]:
    """Turns that a format must read, for each way of writing a message that the template renders."""
    types = {argument: schema["type"] for argument, schema in probe["function"]["parameters"]["properties"].items()}
    first = {argument: _SAMPLES[name] for argument, name in types.items()} | {"words": _FIRST}
    for as_text in (False, True):  # arguments as a mapping, or as the JSON text of one
        for in_parts in (False, True):  # contents as texts, or as lists of parts
            forms = [
                _proof_turn(template, text, calls, as_text=as_text, in_parts=in_parts)
                for calls in ([first], [first, {"words": _SECOND}])
                for text in ("", _SAID)
            ]
            turns = [turn for turn in forms if turn is not None]
            if turns:
                yield turns


def _proof_turn(
    template: ChatTemplate, text: str, calls: Sequence[Mapping[str, Any]], *, as_text: bool, in_parts: bool
) -> _ProofTurn | None:
    """None if the template refuses the turn, or does not render all of it."""

    def message(role: str, content: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": content}] if in_parts else content}

    ask = [message("user", _ASKED)]
    answer = {**message("assistant", text), CALLS: []}
    for number, arguments in enumerate(calls):
        function = {"name": _TOOL, "arguments": json.dumps(arguments) if as_text else arguments}
        # Some templates refuse ids that do not have nine letters and digits.
        answer[CALLS].append({"type": "function", "id": f"prefrl{number:03}", "function": function})
    prompt = template.try_render(ask, add_generation_prompt=True) or ""
    whole = template.try_render([*ask, answer]) or ""
    shared = whole[: common_prefix_length(prompt, whole)]
    if shared != prompt:  # the response starts within the prompt's end, but not within a tag
        shared = _OPEN_TAG.sub("", shared)
    response = whole[len(shared) :]
    shown = (_TOOL, _FIRST, text, *([_SECOND] if len(calls) > 1 else []))
    if not all(part in response for part in shown):
        return None
    return _ProofTurn(shared, response, text, tuple(ToolCall(_TOOL, given) for given in calls))


def _openings(template: ChatTemplate, turns: Sequence[_ProofTurn]) -> tuple[str, ...]:
    """The tags between text and calls that turns without calls do not have."""
    ask, say = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}
    plain = (template.try_render([ask, say, ask]) or "").partition(_ASKED)[2]
    turn = turns[-1]
    before_call = turn.response.partition(_TOOL)[0].rpartition(_SAID)[2]
    return tuple(tag for tag in _TAG.findall(before_call) if tag not in plain)


def _no_format_message(template: ChatTemplate, tool_parser: ToolParser | None, turn: _ProofTurn) -> str:
    rendered = printable(turn.response, max_characters=400)
    if tool_parser is None:
        found = "no known format reads"
    else:
        given = repr(tool_parser) if isinstance(tool_parser, str) else "a response template"
        found = f"tool_parser={given} does not read"
    return (
        f"{found} the tool calls that the chat template of {template.name!r} renders. Set tool_parser to {_REMEDIES}. "
        f"A call is rendered as:\n{rendered}"
    )


def _unreadable(reason: str) -> ToolCall:
    return ToolCall("", {}, f"The tool call cannot be read: {reason}.")


def _text_of(message: Message, field: str) -> str:
    value = message.get(field)
    return value.strip() if isinstance(value, str) else ""


def _calls_of(calls: Any) -> Iterator[Any]:
    """The calls of a message, one by one; those that are text are calls of Python functions."""
    if isinstance(calls, str):
        yield from _python_calls(calls)
    elif isinstance(calls, list | tuple):
        for call in calls:
            yield from _calls_of(call)
    elif calls is not None:
        yield calls


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = (function.get(key) for key in ("name", "arguments")) if isinstance(function, Mapping) else (0, 0)
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("a call needs a name and its arguments by name")
    return name, dict(arguments)


def _python_calls(text: str) -> Iterator[Mapping[str, Any]]:
    """The calls of a text such as `[add(a=1), add(a=2)]`; JSON's `true`, `false` and `null` are values as well."""
    body = ast.parse(text.strip(), mode="eval").body
    for node in body.elts if isinstance(body, ast.List) else [body]:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("a call is written as name(argument=value)")
        values = {str(keyword.arg): ast.literal_eval(_PythonNames().visit(keyword.value)) for keyword in node.keywords}
        yield {"name": ast.unparse(node.func), "arguments": json.loads(json.dumps(values))}


class _PythonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node
