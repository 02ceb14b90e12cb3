"""Tools: their JSON schemas, whether calls agree with them, and the formats in which models write calls.

A format is a response template of transformers. It describes how calls, thinking and text are told apart, not how a
turn starts or stops: see `prefrl.data.tool_calls`. Which format a model writes is proven there with its chat template,
so a wrong format here would never be chosen.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, get_type_hints

from prefrl.errors import ConfigError, reason_of
from prefrl.options.names import nearest

Schema = Mapping[str, Any]  # of a tool, as chat templates take it: {"type": "function", "function": {"name": ...}}

_EXAMPLE = '"""Adds two numbers.\\n\\nArgs:\\n    a: The first number.\\n    b: The second number.\\n"""'
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_MAX_SHOWN = 80  # characters of a value in a message
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def tool_schemas(tools: Sequence[Callable[..., Any]]) -> dict[str, Schema]:
    """The schemas of tools, by the name under which the model calls them.

    Raises:
        ConfigError: As `tool_schema`, or two tools have the same name.
    """
    schemas: dict[str, Schema] = {}
    for tool in tools:
        schema = tool_schema(tool)
        name = schema["function"]["name"]
        if name in schemas:
            raise ConfigError(f"tools: two are named {name!r}: names must differ. Rename one of them")
        schemas[name] = schema
    return schemas


def tool_schema(tool: Callable[..., Any]) -> Schema:
    """The JSON schema of a function or of a method, without `self`, read from its types and its docstring.

    Args:
        tool: Its docstring says in Google's style what it does, and what each argument is; each argument has a type.
            A function that is defined with `def` or `async def`, or a method of an object.

    Returns:
        What chat templates take as one of their `tools`.

    Raises:
        ConfigError: The docstring, a type or a description is missing, a type has no JSON schema, or the arguments
            cannot be given by name; names tool and argument.
    """
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise ConfigError(
            f"tools: {tool!r} is neither a function nor a method. Pass one with type hints and a docstring"
        )
    check_signature(tool.__name__, inspect.signature(tool).parameters.values(), inspect.getdoc(tool))
    from transformers.utils import get_json_schema  # takes a second, which early checks of signatures do not need

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # of transformers, or of evaluating the types, which are the user's
        raise ConfigError(_schema_message(tool, error)) from error
    return schema


def check_signature(name: str, parameters: Iterable[Parameter], docstring: str | None) -> None:
    """Check a tool as far as its signature and its docstring say what the model has to know.

    Args:
        name: Of the tool.
        parameters: Of the function; `self` and `cls` need no type.
        docstring: None: there is none.

    Raises:
        ConfigError: As `tool_schema`, except for types that have no JSON schema.
    """
    arguments = [parameter for parameter in parameters if parameter.name not in ("self", "cls")]
    for parameter in arguments:
        _check_parameter(name, parameter)
    docstring = (docstring or "").strip()
    if not docstring or docstring.startswith(("Args:", "Returns:", "Raises:")):
        lacks = "does not start with" if docstring else "is missing, from which the model learns"
        raise ConfigError(f"tool {name!r}: the docstring {lacks} what the tool does. Write for example {_EXAMPLE}")
    described = {match[1] for match in re.finditer(r"^\s*(\w+):", docstring, re.MULTILINE)}
    for parameter in arguments:
        if parameter.name not in described:
            raise ConfigError(
                f"tool {name!r}: the docstring does not describe the argument {parameter.name!r}. Add a line "
                f"'{parameter.name}: ...' under 'Args:', as in {_EXAMPLE}"
            )


def call_problem(name: str, arguments: Mapping[str, Any], schemas: Mapping[str, Schema]) -> str | None:
    """What is wrong with a call, in words that can be told to the model; None if the tool can be run.

    Returns:
        The first of: no such tool, unknown arguments, missing arguments, an argument that does not agree with its
        schema (`type`, `enum`, `items`, `prefixItems`, `properties`, `additionalProperties`, `required`, `anyOf`,
        `nullable`; other keywords are not looked at).
    """
    if name not in schemas:
        return f"There is no tool {_shown(name)}. {nearest(name, schemas)}"
    parameters = schemas[name]["function"].get("parameters") or {}
    known = parameters.get("properties") or {}
    unknown = [key for key in arguments if key not in known]
    if unknown:
        takes = nearest(unknown[0], known) if known else "It takes no arguments."
        return f"Tool {name!r} has no argument {_shown(unknown[0])}. {takes}"
    missing = [key for key in parameters.get("required") or () if key not in arguments]
    if missing:
        return (
            f"Tool {name!r} needs the argument {missing[0]!r}, {_wanted(known.get(missing[0], {}))}, which is missing."
        )
    for key, value in arguments.items():
        problem = _value_problem(value, known[key], repr(key))
        if problem:
            return f"Tool {name!r}: {problem}."
    return None


def signature_of(schema: Schema) -> str:
    """A tool and its arguments in one line: `search(query: string, limit: integer = ...)`."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    words = []
    for name, one in (parameters.get("properties") or {}).items():
        kind = " or ".join(_types_of(one)) or "value"
        words.append(f"{name}: {kind}" if name in required else f"{name}: {kind} = ...")
    return f"{function['name']}({', '.join(words)})"


def _check_parameter(name: str, parameter: Parameter) -> None:
    if parameter.kind not in _BY_KEYWORD:
        raise ConfigError(
            f"tool {name!r}: argument {str(parameter).partition(':')[0]!r} cannot be given by name, as the model "
            "does. List each argument, without * before it and without / behind it"
        )
    if parameter.annotation is Parameter.empty:
        raise ConfigError(
            f"tool {name!r}: argument {parameter.name!r} has no type. Write for example '{parameter.name}: int'"
        )


def _schema_message(tool: Callable[..., Any], error: Exception) -> str:
    name = tool.__name__
    try:
        hints = get_type_hints(tool)
    except Exception:  # a type that does not exist: the first error says which
        hints = {}
    for argument, hint in hints.items():
        if argument != "return" and not _has_schema(argument, hint):
            return (
                f"tool {name!r}: the type {hint!r} of argument {argument!r} has no JSON schema. Use str, int, float, "
                "bool, list, dict, Literal or a union of these"
            )
    return f"tool {name!r} has no JSON schema: {reason_of(error)}. Change its types or its docstring"


def _has_schema(argument: str, hint: Any) -> bool:
    """Whether a type alone has a schema: asked about a function that has only this argument."""
    from transformers.utils import get_json_schema  # see tool_schema

    def stub() -> None: ...

    stub.__doc__ = f"Stub.\n\nArgs:\n    {argument}: Some.\n"
    stub.__annotations__ = {argument: hint}
    parameter = Parameter(argument, Parameter.KEYWORD_ONLY, annotation=hint)
    stub.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]  # inspect reads it
    try:
        get_json_schema(stub)
    except Exception:  # see tool_schema
        return False
    return True


def _value_problem(value: Any, schema: Schema, where: str) -> str | None:
    """How a value differs from its schema; `where` names it. None if it agrees."""
    if value is None and schema.get("nullable"):
        return None
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and all(_value_problem(value, option, where) for option in options):
        return _must_be(where, schema, value)
    types = _types_of(schema)
    if types and not any(_TYPES[name](value) for name in types):
        return _must_be(where, schema, value)
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return _must_be(where, schema, value)
    if isinstance(value, list):
        return _items_problem(value, schema, where)
    if isinstance(value, dict):
        return _properties_problem(value, schema, where)
    return None


def _items_problem(value: list[Any], schema: Schema, where: str) -> str | None:
    fixed = schema.get("prefixItems")
    if fixed is not None and len(fixed) != len(value):
        return f"{where} must have {len(fixed)} items, not {len(value)}"
    of_each = fixed or [schema.get("items") or {}] * len(value)
    problems = (_value_problem(item, of_each[i], f"{where}[{i}]") for i, item in enumerate(value))
    return next(filter(None, problems), None)


def _properties_problem(value: dict[str, Any], schema: Schema, where: str) -> str | None:
    known = schema.get("properties") or {}
    others = schema.get("additionalProperties", {})
    for key in schema.get("required") or ():
        if key not in value:
            return f"{where} needs the key {key!r}, which is missing"
    for key, item in value.items():
        if key not in known and others is False:
            return f"{where} has no key {_shown(key)}"
        of_key = known.get(key, others)
        problem = _value_problem(item, of_key, f"{where}[{_shown(key)}]") if isinstance(of_key, Mapping) else None
        if problem:
            return problem
    return None


def _must_be(where: str, schema: Schema, value: Any) -> str:
    return f"{where} must be {_wanted(schema)}, not {_shown(value)}"


def _types_of(schema: Schema) -> list[str]:
    """The JSON types that a schema names; empty if it names none, or one that JSON does not have, such as an image."""
    named = schema.get("type") or []
    types = [named] if isinstance(named, str) else list(named)
    return types if all(name in _TYPES for name in types) else []


def _wanted(schema: Schema) -> str:
    """What a schema asks for, in words."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if "enum" in schema:
        words = f"one of {', '.join(map(_shown, schema['enum']))}"
    elif options:
        words = " or ".join(map(_wanted, options))
    else:
        words = " or ".join(_types_of(schema)) or "value"
        words = f"an {words}" if words[0] in "aio" else f"a {words}"
    return f"{words} or null" if schema.get("nullable") else words


def _shown(value: Any) -> str:
    """A value as JSON, which is how the model wrote it, cut off after some characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


ResponseFormat = Mapping[str, Any]  # a response template

# The fields of a message. Calls that a response template leaves as text are read as calls of Python functions.
CALLS, REASONING, TEXT = "tool_calls", "reasoning_content", "content"

_NAME_AND_CONTENT = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def known_formats() -> dict[str, ResponseFormat]:
    """All formats by name: those of transformers, under the names of their model types, then those that it lacks."""
    try:  # late, because it imports torch; not a public name: where it is missing, fewer formats are known
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as of_transformers
    except ImportError:
        of_transformers = {}
    return {name: template for names, template in of_transformers.items() for name in names} | _OWN


def _format(calls: Mapping[str, Any], **others: Mapping[str, Any]) -> ResponseFormat:
    """A response template with a field of calls. Text around calls and thinking is the content."""
    fields = {
        REASONING: {"open": "<think>", "close": "</think>", "content": "text"},
        CALLS: {"repeats": True, "content": "json", "transform": _NAME_AND_CONTENT, **calls},
        TEXT: {"content": "text"},
        **others,
    }
    # An anchor is needed, but only what a prompt leaves open is parsed: see `prefrl.data.tool_calls`.
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A", "fields": fields}


def _deepseek(words: str) -> str:
    """A token of DeepSeek, whose bars and spaces are not ASCII."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_OWN: dict[str, ResponseFormat] = {
    # One call in a turn, with nothing around it: {"name": "add", "parameters": {"a": 1}}
    "llama3": _format(
        {
            "open_pattern": r'(?:<\|python_tag\|>\s*)?(?=\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"parameters")',
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        }
    ),
    # A list: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    "mistral": _format(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
            "repeats": False,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        reasoning_content={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    ),
    # Each by itself: [TOOL_CALLS]add[ARGS]{"a": 1}
    "mistral_args": _format(
        {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\]\s*)?(?=\{)",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
        },
        reasoning_content={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    ),
    # V3 and R1 write the type function and a block of code, V3.1 only the name and the arguments.
    "deepseek_v3": _format(
        {
            "open_pattern": (
                rf"(?:{_deepseek('tool calls begin')}\s*)?{_deepseek('tool call begin')}"
                rf"(?:function{_deepseek('tool sep')}(?P<name>[^\s<`]+)\s*```json"
                rf"|(?!function{_deepseek('tool sep')})(?P<name>[^\s<`]+){_deepseek('tool sep')})"
            ),
            # If the end of the call ends the turn, it may be missing.
            "close_pattern": rf"(?:```)?\s*{_deepseek('tool call end')}|```\s*\Z",
        },
        after_calls={"open": _deepseek("tool calls end"), "content": "text"},
    ),
    # Keys and values in turn: <tool_call>add <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>
    "glm4_moe": _format(
        {
            "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]+)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
        }
    ),
    # <x:invoke name="add"><x:parameter name="a">1</x:parameter></x:invoke>. The header of each part of a turn says to
    # whom it is written.
    "muse": _format(
        {
            "open_pattern": r'<\w+:invoke name="(?P<name>[^"]+)">',
            "close_pattern": r"</\w+:invoke>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<\w+:parameter name="(?P<key>[^"]+)"[^<>]*>(?P<value>.*?)</\w+:parameter>'
            },
        },
        reasoning_content={"open": "to=self<|message|>", "close": "<|eom|>", "content": "text"},
        content={"content": "text", "open": "to=user<|message|>", "close": ["<|eom|>", "<|eot|>"]},
    ),
    # A list of calls as Python writes them: <|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>
    "lfm2": _format(
        {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "content": "text", "transform": "{content}"}
    ),
    # Channels of analysis, commentary and final text; a call's recipient comes before or after the channel.
    "gpt_oss": _format(
        {
            "open_pattern": (
                r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*"
                r"(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
            ),
            "close": "<|call|>",
        },
        reasoning_content={"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
        content={
            "content": "text",
            "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            "close": ["<|end|>", "<|return|>"],
        },
    ),
}
