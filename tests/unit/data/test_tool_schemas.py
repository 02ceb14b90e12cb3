from __future__ import annotations

import functools
from typing import Literal

import pytest

from prefrl.data.tools import call_problem, tool_schema, tool_schemas
from prefrl.errors import ConfigError


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Shop:
    async def offer(self, price: float, unit: Literal["kg", "t"] | None = None) -> str:
        """Offers a price.

        Args:
            price: In euros.
            unit: What it is for.
        """
        return f"{price} for a {unit}"


def test_schema_of_a_function():
    properties = {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "The second."},
    }
    function = tool_schema(add)["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"] == {"type": "object", "properties": properties, "required": ["a"]}


@pytest.mark.parametrize("method", [Shop().offer, Shop.offer])
def test_schema_of_a_method_has_no_self(method):
    parameters = tool_schema(method)["function"]["parameters"]
    assert list(parameters["properties"]) == ["price", "unit"]
    assert parameters["required"] == ["price"]


def test_tools_are_named_once():
    assert list(tool_schemas([add, Shop().offer])) == ["add", "offer"]
    with pytest.raises(ConfigError, match="two are named 'add'"):
        tool_schemas([add, add])


def no_docstring(a: int): ...


def no_type(a):
    """Does.

    Args:
        a: Some.
    """


def no_line(a: int, bc: int):
    """Does.

    Args:
        a: Some.
    """


def no_description(a: int):
    """Args:
    a: Some.
    """


def strange_type(a: int, b: set[int]):
    """Does.

    Args:
        a: Some.
        b: Some.
    """


def unknown_type(a: Unknown):  # noqa: F821
    """Does.

    Args:
        a: Some.
    """


def many(*numbers: int):
    """Does."""


def nameless(a: int, /):
    """Does."""


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (no_docstring, "tool 'no_docstring': the docstring is missing"),
        (no_type, "tool 'no_type': argument 'a' has no type"),
        (no_line, "tool 'no_line': the docstring does not describe the argument 'bc'"),
        (no_description, "tool 'no_description': the docstring does not start with what the tool does"),
        (strange_type, r"tool 'strange_type': the type set\[int\] of argument 'b' has no JSON schema"),
        (unknown_type, "tool 'unknown_type' has no JSON schema: NameError: .*Unknown"),
        (many, r"tool 'many': argument '\*numbers' cannot be given by name"),
        (nameless, "tool 'nameless': argument 'a' cannot be given by name"),
        (functools.partial(add, b=1), "neither a function nor a method"),
        (Shop(), "neither a function nor a method"),
        (len, "neither a function nor a method"),
    ],
)
def test_what_a_tool_lacks_is_named(tool, message):
    with pytest.raises(ConfigError, match=message):
        tool_schema(tool)


SCHEMAS = {
    "add": tool_schema(add),
    "stop": {"function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
    "take": {
        "function": {
            "name": "take",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "unit": {"type": "string", "enum": ["kg", "t"], "nullable": True},
                    "one": {"type": "integer", "enum": [0, 1]},
                    "words": {"type": "array", "items": {"type": "string"}},
                    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
                    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "integer"}},
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                    "either": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]},
                    "both": {"type": ["integer", "string"]},
                    "any": {},
                    "image": {"type": "image"},
                },
            },
        }
    },
}


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("ad", {}, """There is no tool "ad". Did you mean 'add'?"""),
        ("zzz", {}, """There is no tool "zzz". Known: add, stop, take."""),
        ("add", {}, "Tool 'add' needs the argument 'a', an integer, which is missing."),
        ("add", {"a": 1, "c": 2}, """Tool 'add' has no argument "c". Known: a, b."""),
        ("take", {"txt": ""}, """Tool 'take' has no argument "txt". Did you mean 'text'?"""),
        ("stop", {"now": 1}, """Tool 'stop' has no argument "now". It takes no arguments."""),
        ("add", {"a": "1"}, """Tool 'add': 'a' must be an integer, not "1"."""),
        ("add", {"a": True}, "Tool 'add': 'a' must be an integer, not true."),
        ("add", {"a": 1.0}, "Tool 'add': 'a' must be an integer, not 1.0."),
        ("add", {"a": None}, "Tool 'add': 'a' must be an integer, not null."),
        ("take", {"text": 1}, "Tool 'take': 'text' must be a string, not 1."),
        ("take", {"text": ["x" * 100]}, f"""Tool 'take': 'text' must be a string, not ["{"x" * 78}...."""),
        ("take", {"number": float("nan")}, "Tool 'take': 'number' must be a number, not NaN."),
        ("take", {"flag": 1}, "Tool 'take': 'flag' must be a boolean, not 1."),
        ("take", {"unit": "g"}, """Tool 'take': 'unit' must be one of "kg", "t" or null, not "g"."""),
        ("take", {"one": 2}, "Tool 'take': 'one' must be one of 0, 1, not 2."),
        ("take", {"words": "a"}, """Tool 'take': 'words' must be an array, not "a"."""),
        ("take", {"words": ["a", 1]}, "Tool 'take': 'words'[1] must be a string, not 1."),
        ("take", {"pair": [1]}, "Tool 'take': 'pair' must have 2 items, not 1."),
        ("take", {"pair": [1, 2]}, "Tool 'take': 'pair'[1] must be a string, not 2."),
        ("take", {"counts": {"a": "b"}}, """Tool 'take': 'counts'["a"] must be an integer, not "b"."""),
        ("take", {"point": {}}, "Tool 'take': 'point' needs the key 'x', which is missing."),
        ("take", {"point": {"x": 1, "y": 1}}, """Tool 'take': 'point' has no key "y"."""),
        ("take", {"either": "a"}, """Tool 'take': 'either' must be an array or an integer, not "a"."""),
        ("take", {"both": []}, "Tool 'take': 'both' must be an integer or string, not []."),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name, arguments, problem):
    assert call_problem(name, arguments, SCHEMAS) == problem


def test_arguments_that_agree_with_their_schemas():
    arguments = {
        "text": "", "number": 1, "flag": False, "unit": None, "one": 1, "words": [], "pair": [1, "a"],
        "counts": {"a": 1}, "point": {"x": 1}, "either": [1], "both": "a", "any": {"a": [None]}, "image": "x",
    }  # fmt: skip
    assert call_problem("take", arguments, SCHEMAS) is None
    assert call_problem("take", {"number": 0.5, "unit": "kg", "either": 1, "both": 1}, SCHEMAS) is None
    assert call_problem("stop", {}, SCHEMAS) is None
