from __future__ import annotations

import pytest
from tokenizers import decoders

from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.data.next_turn import Answer, next_context
from prefrl.errors import DataError
from prefrl.types import Completion, Turn
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

ASK = {"role": "user", "content": "hi"}
ASK_MORE = {"role": "user", "content": "and?"}
RESULT = {"role": "tool", "content": "5"}
BYE = {"role": "user", "content": "bye"}
CALL = {
    "role": "assistant",
    "content": "Well. ",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
}


def chat_template(jinja, **kwargs):
    tokenizer = chat_tokenizer(jinja)
    tokenizer.add_tokens(["hello"])
    return ChatTemplate(tokenizer, special_tokens(tokenizer), **kwargs)


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def ids_of(template, text):
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def answer(template, message, text, *, sent="?", finish_reason="stop"):
    """What was sampled, one character at a time but for special tokens."""
    ids = [i for part in text.split("hello") for i in (ids_of(template, part), ids_of_characters(template, "hello"))]
    ids = [token for part in ids[:-1] for token in part]
    count = len(ids)
    completion = Completion(ids, finish_reason, [0.0] * count, [True] * count, [0] * count)
    return Answer(message, Turn(ids_of(template, sent), completion))


def ids_of_characters(template, text):
    return template.tokenizer.convert_tokens_to_ids(list(text))


def text_of(template, token_ids):
    return template.tokenizer.decode(token_ids)


def continuation(jinja, message, sampled, new, *, finish_reason="stop", reasoning="keep"):
    """The text that is appended to what was sampled."""
    template = chat_template(jinja)
    last = answer(template, message, sampled, finish_reason=finish_reason)
    context = next_context(template, [ASK, message, *new], seen=[ASK, message], answers=[last], reasoning=reasoning)
    assert context.extends
    assert context.token_ids[: len(last.row)] == last.row
    return text_of(template, context.token_ids[len(last.row) :])


CHATML_NEXT = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("jinja", "message", "sampled", "new", "expected"),
    [
        (templates.CHATML, say("yo"), "yo<|im_end|>", [ASK_MORE], CHATML_NEXT),
        (templates.DEFAULT_SYSTEM, say("yo"), "yo<|im_end|>", [ASK_MORE], CHATML_NEXT),
        # The template cuts white space that was sampled.
        (
            templates.LLAMA3,
            say(" yo "),
            " yo <|eot|>",
            [ASK_MORE],
            "<|header|>user<|/header|>\n\nand?<|eot|><|header|>assistant<|/header|>\n\n",
        ),
        # A call ends with another token than an answer.
        (templates.HEADERS_END, say("yo"), "yo<|user|>", [ASK_MORE], "and?<|assistant|>"),
        (templates.HEADERS_END, CALL, "<call>add a=2</call><|tool|>", [RESULT], "5<|assistant|>"),
        (
            templates.HEADERS_END,
            CALL,
            "<call>add a=2</call><|tool|>",
            [RESULT, ASK_MORE],
            "5<|user|>and?<|assistant|>",
        ),
        (
            templates.CALLS_END,
            CALL,
            'add{"a":2}<|eot|>',
            [RESULT],
            "<|im_start|>tool: 5<|im_end|><|im_start|>assistant: ",
        ),
        # The token that ended the answer is printed only where nothing follows.
        (
            templates.CALLS_END,
            say("yo"),
            "yo<|end|>",
            [ASK_MORE],
            "<|im_start|>user: and?<|im_end|><|im_start|>assistant: ",
        ),
        (templates.ENDS_TEXT, say("yo"), "yo<|eot|>", [ASK_MORE], "\n<|user|>\nand?<|eot|>\n<|assistant|>\n"),
        (templates.ENDS_TEXT, say("yo"), "yo<|end|>", [ASK_MORE], "\n<|user|>\nand?<|eot|>\n<|assistant|>\n"),
        # The template knows no such end token, or the turn goes on behind the result of the tool.
        (templates.CHATML, say("yo"), "yo<|eot|>", [ASK_MORE], CHATML_NEXT),
        (templates.HEADERS_END, say("yo"), "yo<|end|>", [ASK_MORE], "<|user|>and?<|assistant|>"),
        (templates.ONE_TURN, CALL, '<call>{"a": 2}<|eot|>', [RESULT], "<|tool|>5"),
        (templates.ONE_TURN, CALL, '<call>{"a": 2}<|eot|><|tool|>', [RESULT], "5"),
        # White space stands before the end token where nothing follows, and no end token where something does.
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}"
            "\n\n<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            say("yo"),
            "yo<|end|>",
            [ASK_MORE],
            "<|user|>and?<|assistant|>",
        ),
        (templates.NO_END, say("yo"), "yo<|end|>", [ASK_MORE], "\nuser: and?\n"),
        # The generation prompt opens the thinking.
        (
            templates.OPENS_THINKING,
            say("x</think>yo"),
            "x</think>yo<|eot|>",
            [ASK_MORE],
            "<|user|>and?<|assistant|><think>\n",
        ),
        # The content of the next message looks like an end token.
        (
            templates.HEADERS_END,
            say("yo"),
            "yo<|end|>",
            [{**ASK, "content": "<|end|>"}],
            "<|user|><|end|><|assistant|>",
        ),
    ],
)
def test_text_behind_the_sampled_end_token_is_appended(jinja, message, sampled, new, expected):
    assert continuation(jinja, message, sampled, new) == expected


@pytest.mark.parametrize(
    ("jinja", "message", "sampled", "new", "expected"),
    [
        (templates.CHATML, say("yo"), "yo", [ASK_MORE], "<|im_end|>" + CHATML_NEXT),
        (templates.HEADERS_END, say("yo"), "yo", [ASK_MORE], "<|user|>and?<|assistant|>"),
        (templates.HEADERS_END, CALL, "<call>add a=2</call>", [RESULT], "<|tool|>5<|assistant|>"),
        (templates.ONE_TURN, CALL, '<call>{"a": 2}', [RESULT], "<|eot|><|tool|>5"),
        # It could have been sampled before the limit was reached: nothing is cut.
        (templates.CHATML, say("yo<|im_end|>"), "yo<|im_end|>", [ASK_MORE], "<|im_end|>" + CHATML_NEXT),
        # The template ends a turn with two tokens.
        (
            templates.CHATML.replace("<|im_end|>", "<|/header|><|im_end|>"),
            say("yo"),
            "yo",
            [ASK_MORE],
            ("<|im_end|>" + CHATML_NEXT).replace("<|im_end|>", "<|/header|><|im_end|>"),
        ),
    ],
)
def test_answer_that_was_cut_off_is_ended_as_the_template_ends_it(jinja, message, sampled, new, expected):
    for finish_reason in ("length", "stop_string"):  # a stop string is never an end token, whatever it ends with
        assert continuation(jinja, message, sampled, new, finish_reason=finish_reason) == expected


# A guided completion may stop without an end token, and a policy without a word.
@pytest.mark.parametrize("text", ["end", ""])
def test_answer_that_stopped_without_an_end_token_is_ended_by_the_template(text):
    assert continuation(templates.CHATML, say(text), text, [ASK_MORE]) == "<|im_end|>" + CHATML_NEXT


def test_end_token_need_not_be_a_special_one():
    template = chat_template(templates.CHATML.replace("<|im_end|>", "<stop>"))
    template.tokenizer.add_tokens(["<stop>"])
    last = answer(template, say("yo"), "yo<stop>")
    messages = [ASK, say("yo"), ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="keep")
    assert text_of(template, context.token_ids) == "?yo<stop>" + CHATML_NEXT.replace("<|im_end|>", "<stop>")


TEXT_ARGUMENTS = templates.CHATML.replace(
    "{{ m.content }}", "{{ m.tool_calls[0].arguments + '' if m.tool_calls else m.content }}"
)
PARTS = templates.CHATML.replace("{{ m.content }}", "{{ m.content[0].text + '' }}")


def test_calls_with_text_as_arguments_and_contents_of_parts_are_tried():
    call = say("", tool_calls=[{"name": "add", "arguments": {"a": 2}}])
    expected = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert continuation(TEXT_ARGUMENTS, call, '{"a": 2}<|im_end|>', [RESULT]) == expected
    assert continuation(PARTS, say("yo"), "yo<|im_end|>", [RESULT]) == expected


def test_arguments_that_are_text_are_printed_as_they_are():
    template = chat_template(TEXT_ARGUMENTS)
    first, second = (say("", tool_calls=[{"name": "add", "arguments": given}]) for given in ('{"a":1}', {"a": 2}))
    last = answer(template, second, '{"a": 2}<|im_end|>')
    seen = [ASK, first, RESULT, second]
    context = next_context(template, [BYE, *seen[1:], RESULT], seen=seen, answers=[last], reasoning="template")
    text = text_of(template, context.token_ids)
    assert '<|im_start|>assistant\n{"a":1}<|im_end|>' in text
    assert '<|im_start|>assistant\n{"a": 2}<|im_end|>' in text


@pytest.mark.parametrize("content", ["<|im_end|>", "prefrlNew", 'a "b"\n', ""])
def test_any_content_of_a_new_message_is_found(content):
    new = [{"role": "user", "content": content}]
    expected = f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert continuation(templates.CHATML, say("yo"), "yo<|im_end|>", new) == expected


def test_white_space_that_an_end_token_swallows_is_not_sent():
    template = chat_template(templates.CHATML)
    stripping = type(template.tokenizer.added_tokens_decoder[1])("<|eats|>", rstrip=True, special=True)
    template.tokenizer.add_tokens([stripping], special_tokens=True)
    jinja = templates.CHATML.replace("<|im_end|>", "<|eats|>")
    template.tokenizer.chat_template = jinja
    template = ChatTemplate(template.tokenizer, special_tokens(template.tokenizer))
    last = answer(template, say("yo"), "yo<|eats|>", sent="<|im_start|>user\nhi<|eats|><|im_start|>assistant\n")
    messages = [ASK, say("yo"), ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template")
    assert context.token_ids == ids_of(template, template.render(messages, add_generation_prompt=True))


def two_turns(template, first, second, *, stop="<|im_end|>"):
    """A conversation of two answers, whose texts were sampled one character at a time, and the context before it."""
    message = say(first)
    one = answer(template, message, first + stop, sent=template.render([ASK], add_generation_prompt=True))
    sent = next_context(
        template, [ASK, message, ASK_MORE], seen=[ASK, message], answers=[one], reasoning="keep"
    ).token_ids
    other = say(second)
    count = len(second) + 1
    two = answer(template, other, second + stop)
    two = Answer(other, Turn(sent, two.turn.completion))
    assert len(two.turn.completion.token_ids) == count
    return [ASK, message, ASK_MORE, other], [one, two]


@pytest.mark.parametrize("reasoning", ["template", "keep", "strip"])
def test_sampled_ids_of_unchanged_answers_stay_after_an_edit(reasoning):
    template = chat_template(templates.CHATML)
    seen, answers = two_turns(template, "hello", "hello!")
    messages = [{**ASK, "content": "hey"}, *seen[1:], BYE]
    context = next_context(template, messages, seen=seen, answers=answers, reasoning=reasoning)
    assert not context.extends
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
    hello = ids_of(template, "hello")
    assert len(hello) == 1
    assert hello[0] not in context.token_ids


def test_edited_answer_is_sent_as_text_and_dropped_answers_are_gone():
    template = chat_template(templates.CHATML)
    seen, answers = two_turns(template, "hello", "hello!")
    messages = [ASK, say("hello?"), *seen[2:], BYE]
    for conversation, is_canonical in ((messages, True), (messages[2:], False)):
        context = next_context(template, conversation, seen=seen, answers=answers, reasoning="template")
        assert not context.extends
        assert text_of(template, context.token_ids) == template.render(conversation, add_generation_prompt=True)
        assert (ids_of(template, "hello")[0] in context.token_ids) == is_canonical


def test_answers_of_the_same_text_keep_their_own_ids():
    template = chat_template(templates.CHATML)
    seen, answers = two_turns(template, "hello", "hello")
    hello, characters = ids_of(template, "hello"), ids_of_characters(template, "hello")
    end = ids_of(template, "<|im_end|>")
    first = Completion([*hello, *end], "stop", [0.0] * 2, [True] * 2, [0] * 2)
    answers[0] = Answer(seen[1], Turn(answers[0].turn.sent_ids, first))
    for conversation, is_first_kept in (([BYE, *seen[1:], BYE], True), ([*seen[2:], BYE], False)):
        context = next_context(template, conversation, seen=seen, answers=answers, reasoning="template")
        assert (hello[0] in context.token_ids) == is_first_kept
        assert str(characters)[1:-1] in str(context.token_ids)


def test_edit_that_changes_nothing_before_the_last_answer_extends_its_row():
    template = chat_template(templates.CHATML)
    seen, answers = two_turns(template, "hello", "hello!")
    context = next_context(template, [*seen, BYE], seen=seen, answers=answers, reasoning="template")
    assert context.extends


THOUGHT = "<think>x</think>yo"


@pytest.mark.parametrize(
    ("jinja", "reasoning", "extends"),
    [
        (templates.THINKING, "template", False),
        (templates.THINKING, "strip", False),
        (templates.THINKING, "keep", True),
        (templates.CHATML, "template", True),
    ],
)
def test_row_ends_where_the_template_takes_thinking_out_of_content(jinja, reasoning, extends):
    template = chat_template(jinja)
    message = say(THOUGHT)
    last = answer(template, message, THOUGHT + "<|im_end|>", sent=template.render([ASK], add_generation_prompt=True))
    messages = [ASK, message, ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning=reasoning)
    assert context.extends == extends
    text = text_of(template, context.token_ids)
    assert ("<think>" in text) == extends
    if not extends:
        assert text == template.render(messages, add_generation_prompt=True)


def test_prompt_that_was_cut_stays_cut_where_the_template_prints_what_was_sampled():
    # As the last message the answer would have an empty block of thinking in front.
    assert continuation(templates.TOOLS, say("yo"), "yo<|im_end|>", [ASK_MORE], reasoning="template") == CHATML_NEXT


@pytest.mark.parametrize(("reasoning", "extends"), [("template", True), ("keep", True), ("strip", False)])
def test_strip_takes_the_reasoning_field_out(reasoning, extends):
    template = chat_template(templates.KEEPS_THINKING)
    message = say("yo", reasoning_content="o")  # also part of the content
    sent = template.render([ASK], add_generation_prompt=True)
    last = answer(template, message, "<think>o</think>yo<|im_end|>", sent=sent)
    messages = [ASK, message, ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning=reasoning)
    assert context.extends == extends
    shown = messages if extends else [ASK, say("yo"), ASK_MORE]
    assert text_of(template, context.token_ids) == template.render(shown, add_generation_prompt=True)
    assert message["reasoning_content"] == "o"


def test_strip_goes_on_with_the_sampled_ids_of_answers_without_reasoning():
    template = chat_template(templates.KEEPS_THINKING)
    seen, answers = two_turns(template, "hello", "yo")
    thought = {**seen[3], "reasoning_content": "x"}
    answers[1] = Answer(thought, answer(template, thought, "<think>x</think>yo<|im_end|>").turn)
    seen = [*seen[:3], thought]
    context = next_context(template, [*seen, BYE], seen=seen, answers=answers, reasoning="strip")
    assert ids_of(template, "hello")[0] not in context.token_ids
    assert "think" not in text_of(template, context.token_ids)


def test_reasoning_that_the_template_never_prints_ends_the_row():
    template = chat_template(templates.CHATML)
    message = say("yo", reasoning_content="x")
    last = answer(template, message, "<think>x</think>yo<|im_end|>")
    messages = [ASK, message, ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)


def test_white_space_that_the_template_cuts_does_not_end_the_row():
    template = chat_template(templates.LLAMA3)
    message = say(" yo ")
    last = answer(template, message, " yo <|eot|>", sent=template.render([ASK], add_generation_prompt=True))
    messages = [ASK, message, ASK_MORE]
    assert next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template").extends


def test_header_that_the_template_rewrites_ends_the_row_but_not_the_sampled_ids():
    template = chat_template(templates.THINKING, kwargs={"enable_thinking": False})
    message = say("hello")
    last = answer(template, message, "hello<|im_end|>", sent=template.render([ASK], add_generation_prompt=True))
    messages = [ASK, message, ASK_MORE]
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template")
    assert not context.extends
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
    assert ids_of(template, "hello")[0] not in context.token_ids


def test_thinking_is_kept_after_an_edit_too():
    template = chat_template(templates.THINKING)
    seen, answers = two_turns(template, THOUGHT, "hello")
    messages = [{**ASK, "content": "hey"}, *seen[1:], BYE]
    context = next_context(template, messages, seen=seen, answers=answers, reasoning="keep")
    plain = chat_template(templates.CHATML)
    assert text_of(template, context.token_ids) == plain.render(messages, add_generation_prompt=True)
    assert ids_of(template, "hello")[0] not in context.token_ids


def test_end_token_that_the_template_replaces_is_not_sent_after_an_edit():
    template = chat_template(templates.CALLS_END)
    last = answer(template, say("hello"), "hello<|end|>")
    messages = [BYE, say("hello"), ASK_MORE]
    context = next_context(template, messages, seen=[ASK, say("hello")], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
    assert ids_of(template, "hello")[0] not in context.token_ids


def test_opening_that_the_prompt_gave_stays_in_front_of_the_sampled_ids():
    template = chat_template(templates.CHATML)
    last = answer(template, say("Oh, hello"), "hello<|im_end|>")
    messages = [BYE, say("Oh, hello"), ASK_MORE]
    context = next_context(template, messages, seen=[ASK, say("Oh, hello")], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
    assert ids_of(template, "hello")[0] not in context.token_ids


def test_message_behind_an_answer_may_depend_on_its_text():
    initial = templates.CHATML.replace(
        "{{ m.content }}", "{% if loop.previtem %}{{ loop.previtem.content[0] }}{% endif %}{{ m.content }}"
    )
    template = chat_template(initial)
    messages = [ASK, say("yo"), ASK_MORE]
    last = answer(template, say("yo"), "hyo<|im_end|>", sent=template.render([ASK], add_generation_prompt=True))
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)


def test_space_at_the_start_of_an_answer_is_sent_once():
    template = chat_template(templates.CHATML)
    template.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    last = answer(template, say(" hello"), " hello<|im_end|>")
    messages = [BYE, say(" hello"), ASK_MORE]
    context = next_context(template, messages, seen=[ASK, say(" hello")], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
    assert ids_of(template, "hello")[0] not in context.token_ids


def test_calls_of_an_edited_conversation_are_rendered_as_they_are():
    refuses = "{% if m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    template = chat_template(templates.CALLS_END.replace("<|im_start|>", refuses + "<|im_start|>", 1))
    call = {**CALL, "content": ""}
    last = answer(template, call, 'add{"a": 2}<|eot|>')
    messages = [BYE, call, RESULT]
    context = next_context(template, messages, seen=[ASK, call], answers=[last], reasoning="template")
    assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)


def test_template_that_rewrites_contents_decides_what_is_sent():
    template = chat_template(templates.SHOUTS)
    messages = [ASK, say("hello"), ASK_MORE]
    last = answer(template, say("hello"), "hello<|end|>")
    context = next_context(template, messages, seen=messages[:2], answers=[last], reasoning="template")
    assert "HELLO<|end|>" in text_of(template, context.token_ids)


ECHOES = templates.CHATML.replace(
    "{{ m.content }}", "{% if loop.previtem %}{{ loop.previtem.content }}{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("jinja", "message", "new"),
    [
        (templates.SHOUTS, say("hello"), ASK_MORE),
        (ECHOES, say("hello"), ASK_MORE),
        # The content stands behind the result, and the arguments nowhere.
        (templates.ONE_TURN.replace("{{ c.function.arguments | tojson }}", ""), CALL, RESULT),
    ],
)
def test_keep_needs_a_template_that_shows_what_follows_an_answer(jinja, message, new):
    with pytest.raises(DataError, match=r"cannot tell what follows message 1 \(role 'assistant'\) of 3"):
        continuation(jinja, message, "hello<|end|>", [new])


DROPS_TOOLS = templates.CHATML.replace("in messages", "in messages if m.role != 'tool'")


@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize(
    ("jinja", "new", "message"),
    [
        (DROPS_TOOLS, [RESULT], r"drops message 2 \(role 'tool'\) of 3: its content '5' is not in"),
        (DROPS_TOOLS, [ASK_MORE, RESULT], r"drops message 3 \(role 'tool'\) of 4"),
        (
            PARTS.replace("{{", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{", 1),
            [RESULT],
            r"failed at message 2 \(role 'tool'\) of 3: .*no tools",
        ),
        (DROPS_TOOLS, [ASK_MORE, say("yo"), RESULT], r"drops message 4 \(role 'tool'\) of 5"),
        (templates.STRICT, [RESULT], r"failed at message 2 \(role 'tool'\) of 3: .*alternate"),
        (templates.CHATML, [ASK_MORE, say("yo")], r"4 messages has nothing to answer"),
    ],
)
def test_message_that_cannot_be_rendered_is_named(jinja, new, message, reasoning):
    template = chat_template(jinja)
    seen = [ASK, say("yo")]
    last = answer(template, seen[1], "yo<|im_end|>")
    with pytest.raises(DataError, match=message):
        next_context(template, [*seen, *new], seen=seen, answers=[last], reasoning=reasoning)


def test_edit_that_leaves_nothing_is_refused():
    template = chat_template(templates.CHATML)
    last = answer(template, say("yo"), "yo<|im_end|>")
    with pytest.raises(DataError, match="0 messages has nothing to answer"):
        next_context(template, [], seen=[ASK, say("yo")], answers=[last], reasoning="template")
