"""What was sent and sampled in a conversation comes back: as the same ids, in the text that the template prints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.data.next_turn import Answer, next_context
from prefrl.types import Completion, Turn
from tests.unit.data import templates
from tests.unit.data.templates import chat_tokenizer

# The tokens that end answers, and calls; all of these templates print both.
ENDS = {
    templates.CHATML: ("<|im_end|>", "<|im_end|>"),
    templates.DEFAULT_SYSTEM: ("<|im_end|>", "<|im_end|>"),
    templates.LLAMA3: ("<|eot|>", "<|eot|>"),
    templates.ENDS_TEXT: ("<|eot|>", "<|eot|>"),
    templates.THINKING: ("<|im_end|>", "<|im_end|>"),
    templates.HEADERS_END: ("<|user|>", "<|tool|>"),
    templates.CALLS_END: ("<|im_end|>", "<|eot|>"),
    templates.KEEPS_THINKING: ("<|im_end|>", "<|im_end|>"),
}
PRINTS_CALLS = {
    templates.HEADERS_END: lambda a: f"<call>add a={a}</call>",
    templates.CALLS_END: lambda a: f'add{{"a": {a}}}',
}
WORDS = ("ab", "abc", "bc", "cab")  # tokens, so that a text can be split in several ways


def make(jinja):
    tokenizer = chat_tokenizer(jinja)
    tokenizer.add_tokens(list(WORDS))
    return ChatTemplate(tokenizer, special_tokens(tokenizer))


TEMPLATES = {jinja: make(jinja) for jinja in ENDS}

words = st.lists(st.sampled_from(["a", "b", "c", *WORDS]), min_size=1, max_size=5)
texts = words.map("".join)


@st.composite
def answers(draw, jinja, sent_ids):
    """An answer or a call, any split of its text, and the messages that follow."""
    template, is_call = TEMPLATES[jinja], jinja in PRINTS_CALLS and draw(st.booleans())
    was_cut = draw(st.booleans())
    if is_call:
        number = draw(st.integers(0, 99))
        call = {"function": {"name": "add", "arguments": {"a": number}}}
        message, tokens = {"role": "assistant", "content": "", "tool_calls": [call]}, PRINTS_CALLS[jinja](number)
    else:
        tokens = draw(words)
        thought = draw(st.sampled_from(["", "<think>c</think>"])) if jinja == templates.THINKING else ""
        tokens = [*thought, *tokens]
        message = {"role": "assistant", "content": "".join(tokens)}
    ids = template.tokenizer.convert_tokens_to_ids(list(tokens))
    if not was_cut:
        ids += template.tokenizer.convert_tokens_to_ids([ENDS[jinja][is_call]])
    count = len(ids)
    reason = "length" if was_cut else "stop"
    completion = Completion(ids, reason, [0.0] * count, [True] * count, [0] * count)
    new = [{"role": "tool" if is_call else "user", "content": draw(texts)}]
    return Answer(message, Turn(sent_ids, completion)), new


@st.composite
def conversations(draw, reasoning):
    """A template, and every turn of a conversation: its messages, those that were seen, the answers, the context."""
    jinja = draw(st.sampled_from(sorted(ENDS)))
    template = TEMPLATES[jinja]
    messages = [{"role": "user", "content": draw(texts)}]
    sent_ids = ids_of(template, template.render(messages, add_generation_prompt=True))
    said, steps = [], []
    for _ in range(draw(st.integers(1, 3))):
        answer, new = draw(answers(jinja, sent_ids))
        said = [*said, answer]
        seen = [*messages, answer.message]
        messages = [*seen, *new]
        context = next_context(template, messages, seen=seen, answers=said, reasoning=reasoning)
        steps.append((messages, seen, said, context))
        sent_ids = context.token_ids
    return template, steps


def ids_of(template, text):
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def text_of(template, token_ids):
    return template.tokenizer.decode(token_ids)


def holds(token_ids, part):
    return any(token_ids[i : i + len(part)] == part for i in range(len(token_ids)))


def unended(answer):
    completion = answer.turn.completion
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


@given(conversations("keep"))
def test_context_starts_with_all_that_was_sent_and_sampled(case):
    template, steps = case
    plain = TEMPLATES[templates.CHATML] if template is TEMPLATES[templates.THINKING] else template
    for messages, _, said, context in steps:
        row = said[-1].row
        assert context.extends
        assert context.token_ids[: len(row)] == row
        assert all(holds(context.token_ids, answer.turn.completion.token_ids) for answer in said)
        # THINKING prints what CHATML does, but for the thinking that it takes out.
        assert text_of(template, context.token_ids) == plain.render(messages, add_generation_prompt=True)


@given(conversations("template"))
def test_context_is_the_text_of_the_template_in_the_ids_that_were_sampled(case):
    template, steps = case
    for messages, _, said, context in steps:
        text = template.render(messages, add_generation_prompt=True)
        assert text_of(template, context.token_ids) == text
        row = said[-1].row
        assert context.extends == (context.token_ids[: len(row)] == row)
        assert context.extends or template is TEMPLATES[templates.THINKING]
        for answer in said:
            if "<think>" not in str(answer.message["content"]):
                assert holds(context.token_ids, unended(answer))


@given(conversations("template"), texts)
def test_edited_context_is_the_text_of_the_template_in_the_ids_that_were_sampled(case, text):
    template, steps = case
    messages, seen, said, _ = steps[-1]
    messages = [{**messages[0], "content": text + "!"}, *messages[1:]]
    for reasoning in ("template", "strip", "keep"):
        context = next_context(template, messages, seen=seen, answers=said, reasoning=reasoning)
        assert not context.extends
        if reasoning != "keep":
            assert text_of(template, context.token_ids) == template.render(messages, add_generation_prompt=True)
        for answer in said:
            if reasoning == "keep":
                assert holds(context.token_ids, answer.turn.completion.token_ids)
            elif "<think>" not in str(answer.message["content"]):
                assert holds(context.token_ids, unended(answer))
