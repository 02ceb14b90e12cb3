"""The formats in which models write tool calls, as response templates of transformers.

A format describes how calls, thinking and text are told apart, not how a turn starts or stops: see
`prefrl.data.tool_calls`. Which format a model writes is proven there with its chat template, so a wrong format here
would never be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CALLS", "REASONING", "TEXT", "ResponseFormat", "known_formats"]

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
