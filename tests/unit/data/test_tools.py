"""Schemas of tools, and the calls that a model writes."""

from __future__ import annotations

import functools
import json
import random
import time
from typing import Literal

import pytest

from prefrl.data import tool_calls
from prefrl.data.tool_calls import ParsedTurn, ToolCall, tool_call_reader
from prefrl.data.tools import call_problem, known_formats, tool_schema, tool_schemas
from prefrl.errors import ConfigError
from tests.unit.data import templates
from tests.unit.data.tool_templates import DEEPSEEK_NEW, FORMATS, HARMONY, HERMES, deepseek, template, tool_template


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def note(text: str, share: float, urgent: bool, tags: list[str], place: dict[str, int]) -> None:
    """Takes a note.

    Args:
        text: What.
        share: How much.
        urgent: Whether to hurry.
        tags: Some.
        place: Where.
    """


TOOLS = tool_schemas([add, note])
NOTE = {"text": "007", "share": 1.5, "urgent": False, "tags": ["a, b", "c"], "place": {"x": 3}}
ADD = {"a": 1, "b": -2}
JSON_BLOCK = '```json\n{"a": 1}\n```'
ASK = {"role": "user", "content": "hi"}


def rendered(chat, *calls, text=""):
    """A prompt, and the response that calls tools."""
    written = [{"id": "a", "type": "function", "function": {"name": n, "arguments": given}} for n, given in calls]
    prompt = chat.render([ASK], add_generation_prompt=True)
    whole = chat.render([ASK, {"role": "assistant", "content": text, "tool_calls": written}])
    assert whole.startswith(prompt)
    return prompt, whole.removeprefix(prompt)


def hermes(call):
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(params=[1, 512], ids=["fed by characters", "fed at once"])
def num_fed(request, monkeypatch):
    monkeypatch.setattr(tool_calls, "_NUM_FED", request.param)


@pytest.mark.usefixtures("num_fed")
@pytest.mark.parametrize("name", FORMATS)
def test_format_is_found_and_reads_what_the_template_renders(name):
    chat = tool_template(FORMATS[name])
    reader = tool_call_reader(chat, TOOLS)
    assert reader.name == name
    calls = [("note", NOTE), ("add", ADD)]
    for some in ([calls[0]], calls):
        for text in ("", "Let me see."):
            if name == "llama3" and (text or len(some) > 1):
                continue  # its template renders neither
            expected = some[:1] if name == "gpt_oss" else some
            prompt, response = rendered(chat, *some, text=text)
            turn = reader.read(response, prompt=prompt)
            assert turn.calls == tuple(ToolCall(*call) for call in expected)
            assert (turn.text or turn.reasoning) == text
            # Generation may stop without the last token, or with another one.
            stopped = response.rstrip()[: response.rstrip().rindex("<")]
            assert reader.read(stopped, prompt=prompt) == turn
            assert reader.read(stopped + "<|eot|>", prompt=prompt) == turn


def test_a_turn_without_calls_is_its_text():
    for jinja, answer in ((HERMES, " 3 > 2 <|im_end|>"), (HARMONY, "<|channel|>final<|message|>3 > 2<|return|>")):
        reader = tool_call_reader(tool_template(jinja), TOOLS)
        assert reader.read(answer, prompt="") == ParsedTurn("3 > 2", ())


def test_text_outside_all_channels_is_not_lost():
    assert tool_call_reader(tool_template(HARMONY), TOOLS).read("3 > 2", prompt="") == ParsedTurn("3 > 2", ())


def test_tags_of_turns_without_calls_start_no_call():
    turn = ParsedTurn("3 <|start|> 2", ())
    assert tool_call_reader(tool_template(HARMONY), TOOLS).read("3 <|start|> 2", prompt="") == turn


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"),
        ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"),
    ],
    ids=["contents are lists of parts", "thinking that finished turns do not have"],
)
def test_templates_that_render_calls_in_another_way(old, new):
    assert tool_call_reader(tool_template(HERMES.replace(old, new)), TOOLS).name == "qwen2"


def test_all_text_around_calls_is_kept():
    reader = tool_call_reader(tool_template(HERMES), TOOLS)
    call = hermes('{"name": "add", "arguments": {"a": 1}}')
    assert reader.read(f"One. {call} Two. {call}\nThree.<|im_end|>", prompt="").text.split() == [
        "One.",
        "Two.",
        "Three.",
    ]


def test_format_does_not_depend_on_the_header_of_a_turn():
    jinja = HERMES.replace("<|im_start|>{{ m.role }}", "<|header|>{{ m.role }}<|/header|>")
    jinja = jinja.replace("<|im_start|>assistant", "<|header|>assistant<|/header|>").replace("<|im_end|>", "<|eot|>")
    chat = tool_template(jinja)
    prompt, response = rendered(chat, ("add", ADD), text="So:")
    assert "im_start" not in prompt + response
    assert tool_call_reader(chat, TOOLS).read(response, prompt=prompt) == ParsedTurn("So:", (ToolCall("add", ADD),))


def test_arguments_that_must_be_a_json_text():
    chat = tool_template(DEEPSEEK_NEW)
    reader = tool_call_reader(chat, TOOLS)
    prompt, response = rendered(chat, ("note", json.dumps(NOTE)), ("add", json.dumps(ADD)))
    assert reader.name == "deepseek_v3"
    assert reader.read(response, prompt=prompt).calls == (ToolCall("note", NOTE), ToolCall("add", ADD))


def test_a_text_is_a_number_only_if_the_format_has_no_types():
    typed = tool_call_reader(tool_template(HERMES), TOOLS)
    (call,) = typed.read(hermes('{"name": "add", "arguments": {"a": "1"}}'), prompt="").calls
    assert call.problem == """Tool 'add': 'a' must be an integer, not "1"."""
    untyped = tool_call_reader(tool_template(FORMATS["qwen3_5"]), TOOLS)
    (call,) = untyped.read(hermes("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"), prompt="").calls
    assert call == ToolCall("add", {"a": 1})


def test_only_types_that_tools_use_must_be_read():
    without_true = HERMES.replace("f.arguments | tojson", "f.arguments | tojson | replace('true', 'yes')")
    assert tool_call_reader(tool_template(without_true), tool_schemas([add])).name == "qwen2"
    with pytest.raises(ConfigError, match="no known format reads the tool calls"):
        tool_call_reader(tool_template(without_true), TOOLS)


@pytest.mark.parametrize(
    ("prompt", "turn"),
    [
        ("...<|im_start|>assistant\n<think>\n", ParsedTurn("So:", (ToolCall("add", {"a": 1}),), "Hm.")),
        (
            "...<|im_start|>assistant\n<think>\n\n</think>\n\n",
            ParsedTurn("Hm.</think>So:", (ToolCall("add", {"a": 1}),)),
        ),
        ("<think> is a tag.<|im_start|>assistant\n", ParsedTurn("Hm.</think>So:", (ToolCall("add", {"a": 1}),))),
    ],
)
def test_thinking_that_the_prompt_opens_is_closed_by_the_response(prompt, turn):
    reader = tool_call_reader(tool_template(HERMES), TOOLS)
    response = "Hm.</think>So:" + hermes('{"name": "add", "arguments": {"a": 1}}')
    assert reader.read(response, prompt=prompt) == turn


@pytest.mark.parametrize(
    ("name", "response", "problem"),
    [
        ("qwen2", hermes('{"name": "ad", "arguments": {}}'), "There is no tool \"ad\". Did you mean 'add'?"),
        ("qwen2", hermes('{"name": "add", "arguments": {"a": 1}'), "cannot be read: JSONDecodeError: Expecting ','"),
        ("qwen2", '<tool_call>\n{"name": "add", "arg', "cannot be read: JSONDecodeError: Unterminated string"),
        ("qwen2", hermes('{"arguments": {"a": 1}}'), "a call needs a name and its arguments by name"),
        ("qwen2", hermes('{"name": "add", "arguments": [1]}'), "a call needs a name and its arguments by name"),
        ("qwen2", hermes('"add"'), "a call needs a name and its arguments by name"),
        ("qwen2", hermes("[" * 10000), "cannot be read: RecursionError"),
        ("qwen2", hermes('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}"), "cannot be read: ValueError"),
        (
            "qwen3_5",
            hermes('{"name": "add", "arguments": {"a": 1}}'),
            "no call in the right format follows <tool_call>",
        ),
        ("qwen3_5", hermes("<function=add>\n<parameter=a>1</function>"), "needs the argument 'a', an integer"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "cannot be read: JSONDecodeError"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}; {"name": "add"}', "JSONDecodeError: Extra data"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}]', "cannot be read"),
        ("mistral", "[TOOL_CALLS] add(a=1)", "no call in the right format follows [TOOL_CALLS]"),
        ("lfm2", "<|tool_call_start|>[add(1)]", "a call is written as name(argument=value)"),
        ("lfm2", "<|tool_call_start|>[add(a=1", "cannot be read: SyntaxError"),
        ("lfm2", "<|tool_call_start|>[add(a=b.c)]", "cannot be read: ValueError"),
        ("lfm2", "<|tool_call_start|>[add(a={1})]", "cannot be read: TypeError"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name, response, problem):
    turn = tool_call_reader(tool_template(FORMATS[name]), TOOLS).read("Hm. " + response, prompt="")
    assert [problem in str(call.problem) for call in turn.calls] == [True]
    assert turn.text.startswith("Hm.")


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("qwen2", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'),
        ("deepseek_v3", deepseek("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n") + JSON_BLOCK),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("mistral_args", '[TOOL_CALLS]add[CALL_ID]ab12[ARGS] {"a": 1}'),
        ("gpt_oss", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'),
        ("lfm2", "<|tool_call_start|>add(a=1)"),
    ],
)
def test_calls_that_models_write_otherwise_than_their_templates(name, response):
    reader = tool_call_reader(tool_template(FORMATS[name]), TOOLS)
    assert reader.read(response, prompt="") == ParsedTurn("", (ToolCall("add", {"a": 1}),))


def test_values_of_json_in_calls_of_python():
    reader = tool_call_reader(tool_template(FORMATS["lfm2"]), TOOLS)
    call = 'note(text=\'\', share=-1, urgent=true, tags=["a"], place={"x": null})'
    (call,) = reader.read(f"<|tool_call_start|>[{call}]<|tool_call_end|>", prompt="").calls
    assert call.arguments == {"text": "", "share": -1, "urgent": True, "tags": ["a"], "place": {"x": None}}
    assert call.problem == """Tool 'note': 'place'["x"] must be an integer, not null."""


@pytest.mark.parametrize("name", ["glm4_moe", "qwen2"])
def test_thinking_that_a_prompt_tells_of_is_not_open(name):
    reader = tool_call_reader(tool_template(FORMATS[name]), TOOLS)
    prompt = "<|im_start|>user\nWrite <think> first.<|im_end|>\n<|im_start|>assistant\n"
    assert reader.read("So:", prompt=prompt) == ParsedTurn("So:", ())
    assert reader.read("So:", prompt=prompt + "<think>\n") == ParsedTurn("", (), "So:")


def test_a_good_call_beside_one_that_cannot_be_run():
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]
    response = "\n".join(hermes(json.dumps(call)) for call in calls)
    good, bad = tool_call_reader(tool_template(HERMES), TOOLS).read(response, prompt="").calls
    assert (good, bad.name) == (ToolCall("add", {"a": 1}), "add")
    assert "needs the argument 'a'" in str(bad.problem)


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_raises(name):
    chat = tool_template(FORMATS[name])
    reader = tool_call_reader(chat, TOOLS)
    prompt, response = rendered(chat, ("note", NOTE), text="" if name == "llama3" else "So:")
    dice = random.Random(0)
    for _ in range(100):
        start, stop = sorted(dice.choices(range(len(response) + 1), k=2))
        other = dice.choice(["", "}", '"', "<", response])
        turn = reader.read(response[:start] + other + response[stop:], prompt=prompt)
        assert all(call.problem or call.name in TOOLS for call in turn.calls)


def test_time_grows_with_the_text_and_not_with_its_square():
    reader = tool_call_reader(tool_template(HERMES), TOOLS)
    start = time.process_time()
    turn = reader.read(hermes('{"name": "add", "arguments": {"a": 1}}\n') * 1000, prompt="")
    spaces = reader.read("a" + "\n" * 100_000 + "b", prompt="")
    assert time.process_time() - start < 2  # seconds; 30 and more if it were
    assert len(turn.calls) == 1000
    assert spaces.text.split() == ["a", "b"]


OWN_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": " DONE",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def changed(response_template, field, **changes):
    fields = response_template["fields"]
    return {**response_template, "fields": {**fields, field: {**fields[field], **changes}}}


_QWEN = known_formats()["qwen3_5"]
_ARGUMENTS = {
    **_QWEN["fields"]["tool_calls"]["content_args"],
    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
}
GUESSES_TYPES = changed(_QWEN, "tool_calls", content_args=_ARGUMENTS)  # reads the text 75001 as a number
OWN = template("CALL {{ f.name }} {{ f.arguments | tojson }} DONE")


def test_response_template_of_the_tokenizer_comes_first():
    chat = tool_template(OWN)
    chat.tokenizer.response_template = OWN_TEMPLATE
    prompt, response = rendered(chat, ("note", NOTE))
    reader = tool_call_reader(chat, TOOLS)
    assert reader.name == "tokenizer.response_template"
    assert reader.read(response, prompt=prompt).calls == (ToolCall("note", NOTE),)


def test_response_template_of_the_tokenizer_comes_before_an_equal_one():
    chat = tool_template(HERMES)
    chat.tokenizer.response_template = dict(known_formats()["qwen2"])
    assert tool_call_reader(chat, TOOLS).name == "tokenizer.response_template"


@pytest.mark.parametrize("own", [OWN_TEMPLATE, {"fields": {"content": {"content": "text"}}}])
def test_response_template_of_the_tokenizer_that_reads_no_calls_is_not_used(own):
    chat = tool_template(HERMES)
    chat.tokenizer.response_template = own
    assert tool_call_reader(chat, TOOLS).name == "qwen2"


@pytest.mark.parametrize(("jinja", "given"), [(OWN, OWN_TEMPLATE), (HERMES, "qwen2"), (HERMES, "qwen3_moe")])
def test_given_format_is_used_if_it_passes(jinja, given):
    chat = tool_template(jinja)
    prompt, response = rendered(chat, ("note", NOTE))
    reader = tool_call_reader(chat, TOOLS, tool_parser=given)
    assert reader.read(response, prompt=prompt).calls == (ToolCall("note", NOTE),)


@pytest.mark.parametrize(
    ("jinja", "given", "message"),
    [
        (OWN, None, "no known format reads the tool calls that .* Set tool_parser to .*as:\nCALL prefrl_probe"),
        (HERMES, "llama3", "tool_parser='llama3' does not read the tool calls that .*as:\n<tool_call>"),
        (HERMES, OWN_TEMPLATE, "tool_parser=a response template does not read the tool calls"),
        (OWN, changed(OWN_TEMPLATE, "tool_calls", repeats=False), "a response template does not read"),
        (OWN, changed(OWN_TEMPLATE, "content", open="TEXT"), "a response template does not read"),
        (FORMATS["qwen3_5"], GUESSES_TYPES, "a response template does not read"),
        (HERMES, "lama3", "tool_parser='lama3' is no known format. Did you mean 'llama3'?"),
        (HERMES, {"fields": {}}, "tool_parser is not a response template with the field 'tool_calls'"),
        (HERMES, 3, "tool_parser=3: must be None, the name of a format, a response template"),
        (templates.CHATML, None, "renders no tool calls"),
        (templates.STRICT, "qwen2", "renders no tool calls"),
    ],
)
def test_format_that_cannot_be_used_is_refused(jinja, given, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        tool_call_reader(tool_template(jinja), TOOLS, tool_parser=given)


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"content": " So: "}, ParsedTurn("So:", ())),
        (
            {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
            ParsedTurn("", (ToolCall("add", {"a": 1}),)),
        ),
        (
            {"reasoning": "Hm.", "tool_calls": {"name": "add", "arguments": {"a": 1}}},
            ParsedTurn("", (ToolCall("add", {"a": 1}),), "Hm."),
        ),
        ({"tool_calls": "[add(a=1)]"}, ParsedTurn("", (ToolCall("add", {"a": 1}),))),
    ],
)
def test_function_is_trusted_with_the_text(message, turn):
    texts = []
    reader = tool_call_reader(
        tool_template(templates.CHATML), TOOLS, tool_parser=lambda text: texts.append(text) or message
    )
    assert reader.read("some <|im_end|>", prompt="") == turn
    assert texts == ["some <|im_end|>"]


def test_calls_of_a_function_are_checked():
    def parser(text):
        return {"content": "So:", "tool_calls": [json.loads(text)]}

    reader = tool_call_reader(tool_template(templates.CHATML), TOOLS, tool_parser=parser)
    for text, problem in (
        ("{", "JSONDecodeError"),
        ("{}", "needs a name"),
        ('{"name": "ad", "arguments": {}}', "'add'"),
    ):
        (call,) = reader.read(text, prompt="").calls
        assert problem in str(call.problem)


def test_function_that_returns_no_message_is_an_error():
    reader = tool_call_reader(tool_template(templates.CHATML), TOOLS, tool_parser=lambda text: [text])
    with pytest.raises(ConfigError, match="the function returned list: must be a message"):
        reader.read("some", prompt="")


def test_formats_of_transformers_are_where_they_were():
    assert {"qwen2", "qwen3", "qwen3_5", "gemma4"} <= set(known_formats())


def test_unread_fields_of_a_users_template_raise_nothing():
    fields = {**OWN_TEMPLATE["fields"], "score": {"open": "SCORE", "close": "END", "content": "int"}}
    reader = tool_call_reader(tool_template(OWN), TOOLS, tool_parser={**OWN_TEMPLATE, "fields": fields})
    turn = reader.read("So: SCORE many END", prompt="")
    assert turn.text == "So: SCORE many END"
    assert "cannot be read: ValueError: invalid literal for int" in str(turn.calls[0].problem)


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
def test_what_is_wrong_with_arguments_is_said(name, arguments, problem):
    assert call_problem(name, arguments, SCHEMAS) == problem


def test_arguments_that_agree_with_their_schemas():
    arguments = {
        "text": "", "number": 1, "flag": False, "unit": None, "one": 1, "words": [], "pair": [1, "a"],
        "counts": {"a": 1}, "point": {"x": 1}, "either": [1], "both": "a", "any": {"a": [None]}, "image": "x",
    }  # fmt: skip
    assert call_problem("take", arguments, SCHEMAS) is None
    assert call_problem("take", {"number": 0.5, "unit": "kg", "either": 1, "both": 1}, SCHEMAS) is None
    assert call_problem("stop", {}, SCHEMAS) is None
