"""The token ids that are sent for the next turn of a conversation.

What was sampled is never decoded and encoded again to be sent as the same text. As long as a conversation only grows,
its next context is

    ids that were sent + ids that were sampled + ids of the text that the template puts behind the assistant's message,
    up to the end of the next assistant header.

No template is known by name. That text is found by rendering the conversation with a marker in the last assistant
message, and cutting behind the token that the completion ended with: a template may end a call with another token than
a turn. If history was edited, or the template prints earlier turns differently than they were sampled (for example
without their thinking), the conversation is rendered anew. The ids of a completion then stand wherever the template
prints the text of the completion as it was sampled; everything else is text, which is tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefrl.data.chat import MARKER, ChatTemplate, Span, common_prefix_length, encode, last_special
from prefrl.data.formats import REASONING_FIELDS
from prefrl.errors import DataError
from prefrl.options.types import ReasoningInHistory

if TYPE_CHECKING:
    from prefrl.data.formats import Message
    from prefrl.types import Turn

# Stands for the content of a message that is new in the conversation.
_NEW_MARKER = "prefrlNewMessage{}Marker"
_TEXT_SHOWN = 60


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn of a conversation."""

    # With all that was sampled: content, reasoning and calls. An opening that the prompt gave is part of its content.
    message: Message
    turn: Turn

    @property
    def row(self) -> list[int]:
        """The ids that were sent, and those that were sampled."""
        return [*self.turn.sent_ids, *self.turn.completion.token_ids]


@dataclass(frozen=True)
class NextContext:
    """The ids to send for the next turn."""

    token_ids: list[int]
    # They start with the row of the last answer: its turn and the next one can be trained as one row.
    extends: bool


@dataclass(frozen=True)
class _Seam:
    """The text behind an assistant's message, up to the end of the next assistant header."""

    marked: Message  # the message with a marker
    after: str  # what follows the marker
    end: Span  # characters of `after` that stand for the token that ended the completion; empty if there is none


def first_context(template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids to send for a conversation without an answer of the policy.

    Raises:
        DataError: The template refuses or drops a message.
    """
    text = template.render(_accepted(template, messages, 0), add_generation_prompt=True)
    return encode(text, [], template.tokenizer).token_ids


def next_context(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    seen: Sequence[Message],
    answers: Sequence[Answer],
    reasoning: ReasoningInHistory,
) -> NextContext:
    """The ids to send for the next turn.

    With `reasoning="keep"` every sampled id stays, and the text between completions is appended. With "template" the
    next turn sees what the template prints: as long as that does not change what was printed when the last answer was
    sampled, its row is extended; otherwise the conversation is rendered anew. With "strip" it sees what the template
    prints for messages without their reasoning fields.

    Args:
        template: Of the whole conversation, with its tools.
        messages: All that the next turn sees. They may differ from `seen` anywhere: then history was edited.
        seen: What the last turn saw, and its answer.
        answers: What was sampled in this conversation, in order; at least one.
        reasoning: What the next turn sees of the thinking in earlier ones.
    Returns:
        The ids, and whether they start with the row of the last answer.
    Raises:
        DataError: The template refuses or drops a message, the messages end with one of the assistant, or, with
            `reasoning="keep"`, the text between two turns cannot be found; names template and message.
    """
    if not messages or messages[-1]["role"] == "assistant":
        raise DataError(
            f"the next turn of a conversation of {len(messages)} messages has nothing to answer: the role of the last "
            "message must not be 'assistant'"
        )
    last = answers[-1]
    known = common_prefix_length(messages, seen)
    is_edited = known < len(seen)
    sampled = _sampled(messages, answers)
    if reasoning == "strip":
        messages = [_without_reasoning(message) for message in messages]
    messages = _accepted(template, messages, known)
    if reasoning == "keep":
        token_ids = _join(template, messages, sampled) if is_edited else _append(template, messages, known - 1, last)
    else:
        seam = None if is_edited else _seam(template, messages, known - 1, last.turn)
        if seam is not None and _stands_as_sampled(template, messages, known - 1, last, seam, reasoning):
            token_ids = [*last.row, *_ids_behind(template, last.turn, seam)]
        else:
            token_ids = _render_anew(template, messages, sampled)
    return NextContext(token_ids, extends=token_ids[: len(last.row)] == last.row)


def _sampled(messages: Sequence[Message], answers: Sequence[Answer]) -> dict[int, Answer]:
    """The answers that are still in the conversation, by the number of their message, in order."""
    found, rest = {}, list(answers)
    for index in reversed(range(len(messages))):
        earlier = [i for i, answer in enumerate(rest) if answer.message == messages[index]]
        if earlier:
            found[index] = rest[earlier[-1]]
            rest = rest[: earlier[-1]]
    return dict(reversed(found.items()))


def _append(template: ChatTemplate, messages: Sequence[Message], number: int, answer: Answer) -> list[int]:
    """The row of the answer with this number, and the text behind it.

    Raises:
        DataError: The template does not show that text.
    """
    seam = _seam(template, messages, number, answer.turn)
    if seam is None:
        raise DataError(
            f"chat template of {template.name!r}: cannot tell what follows message {number} (role 'assistant') of "
            f"{len(messages)}: the template changes its content or the arguments of its last call when it renders "
            "them before the next message. Use another template, or set reasoning_in_history='template'"
        )
    return [*answer.row, *_ids_behind(template, answer.turn, seam)]


def _join(template: ChatTemplate, messages: Sequence[Message], sampled: Mapping[int, Answer]) -> list[int]:
    """The sampled ids of all answers in an edited conversation, with the text before and behind each.

    Raises:
        DataError: The template does not show the text behind an answer.
    """
    numbers = [*sampled, len(messages)]
    sent_ids = encode(template.render(messages[: numbers[0]], add_generation_prompt=True), [], template.tokenizer)
    token_ids = sent_ids.token_ids
    for number, following in pairwise(numbers):
        turn = replace(sampled[number].turn, sent_ids=token_ids)
        token_ids = _append(template, messages[:following], number, replace(sampled[number], turn=turn))
    return token_ids


def _render_anew(template: ChatTemplate, messages: Sequence[Message], sampled: Mapping[int, Answer]) -> list[int]:
    """The rendered conversation, with the sampled ids of each answer whose text stands in it as it was sampled."""
    text = template.render(messages, add_generation_prompt=True)
    token_ids: list[int] = []
    start, before = 0, None  # where the text that is not encoded yet starts, and the end token before it
    for number, answer in sampled.items():
        seam = _seam(template, messages, number, answer.turn)
        said, stop = said_text(template, answer.turn), _stop(template, answer.turn)
        end = _end(text, seam)
        if end is None or not text[start:end].endswith(said):
            continue
        token_ids += _encode_after(template, before, text[start : end - len(said)])
        ids = answer.turn.completion.token_ids
        before = stop if stop is not None and text.startswith(stop, end) else None
        # The template may end the turn with another token than the policy did.
        token_ids += ids if before is not None or stop is None else ids[:-1]
        start = end + len(before or "")
    return [*token_ids, *_encode_after(template, before, text[start:])]


def _stands_as_sampled(
    template: ChatTemplate,
    messages: Sequence[Message],
    number: int,
    answer: Answer,
    seam: _Seam,
    reasoning: ReasoningInHistory,
) -> bool:
    """Whether the template prints the conversation up to an answer as it stood when the answer was sampled."""
    opening = template.try_render(messages[:number], add_generation_prompt=True)
    text = template.render(messages, add_generation_prompt=True)
    end = _end(text, seam)
    if end is None or opening is None or not text.startswith(opening):
        return False
    said = text[len(opening) : end]
    if said == said_text(template, answer.turn):
        return True
    thoughts = [answer.message[name].strip() for name in REASONING_FIELDS if isinstance(answer.message.get(name), str)]
    if any(thought and (reasoning == "strip" or thought not in said) for thought in thoughts):
        return False
    # The template need not print what was sampled, but the same as when the answer was the last message.
    closing = _closing(template, [*messages[:number], seam.marked])
    as_last = template.try_render(messages[: number + 1])
    return closing is not None and as_last == text[:end] + closing[seam.end.start :]


def _end(text: str, seam: _Seam | None) -> int | None:
    """The character of a rendered conversation at which the end token of an answer starts; None if it is not found."""
    if seam is None:
        return None
    tail = seam.after[seam.end.start :]
    return len(text) - len(tail) if text.endswith(tail) else None


def _seam(template: ChatTemplate, messages: Sequence[Message], number: int, turn: Turn) -> _Seam | None:
    """The text behind the assistant's message of this number; None if the template does not show it."""
    earlier, later = messages[:number], messages[number + 1 :]
    new = next((i for i, message in enumerate(later) if message["role"] == "assistant"), len(later))
    probes = [*_probes(later[:new]), *later[new:]]
    for marked in _marked(messages[number]):
        after = _after_marker(template, [*earlier, marked, *later])
        probed = _after_marker(template, [*earlier, marked, *probes])
        if after is None or probed is None or _first_missing(probed, range(new)) is not None:
            continue
        between = after[: common_prefix_length(after, probed)]
        stop = _stop(template, turn)
        if stop is not None and stop in between:
            end = Span(between.index(stop), between.index(stop) + len(stop))
        else:
            closing = _closing(template, [*earlier, marked]) or ""
            end = _other_end(template, after, closing, stop, has_calls=bool(marked.get("tool_calls")))
        return _Seam(marked, after, end)
    return None


def _other_end(template: ChatTemplate, after: str, closing: str, stop: str | None, *, has_calls: bool) -> Span:
    """Where a turn ends whose template does not print the token that the completion ended with.

    Args:
        template: Knows the special tokens.
        after: The text behind a marker.
        closing: The text behind the marker where the conversation ends there.
        stop: The token that the completion ended with; None if it was cut off.
        has_calls: The message has calls, a part of which may stand behind the marker.
    Returns:
        The characters of `after` that stand for the token; empty if none does.
    """
    if stop is None and not has_calls:
        return Span(0, 0)
    shared = after[: common_prefix_length(after, closing)]
    end = last_special(shared, template.special_tokens)
    if end is not None:
        return end if stop is not None else Span(end.start, end.start)
    if stop is not None and stop in closing and after.startswith(closing[: closing.index(stop)]):
        # Where the conversation goes on, the template prints another token in its place.
        start = closing.index(stop)
        replacement = next((token for token in template.special_tokens if after.startswith(token, start)), "")
        return Span(start, start + len(replacement))
    return Span(len(shared), len(shared)) if has_calls else Span(0, 0)


def _marked(message: Message) -> Iterator[Message]:
    """The message with a marker near its end: as the argument of its last call, or as its content."""
    if message.get("tool_calls"):
        *others, last = message["tool_calls"]
        marked = _map_arguments(last, _marked_arguments)
        yield {**_with_content(message, ""), "tool_calls": [*others, marked]}
    yield _with_content(message, MARKER)


def _after_marker(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """The text behind the marker, up to the end of the next assistant header; None if it does not stand there once."""
    text = template.try_render(messages, add_generation_prompt=True)
    return text.partition(MARKER)[2] if text is not None and text.count(MARKER) == 1 else None


def _closing(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    """The text behind the marker in the last message; None if the template refuses a conversation that ends there."""
    text = template.try_render(messages)
    return text.partition(MARKER)[2] if text is not None else None


def _ids_behind(template: ChatTemplate, turn: Turn, seam: _Seam) -> list[int]:
    """The ids that follow what was sampled in a turn."""
    return _encode_after(template, _stop(template, turn), seam.after[seam.end.stop :])


def _accepted(template: ChatTemplate, messages: Sequence[Message], known: int) -> list[Message]:
    """The messages in a form of which the template prints the new ones.

    A form is the messages as they are, with the arguments of calls as JSON text, or with contents as lists of parts.

    Raises:
        DataError: The template refuses a message, or drops the content of a new one.
    """
    new = [number for number, message in enumerate(messages[known:]) if message["role"] != "assistant"]
    forms = [[change(message) for message in messages] for change in (dict, _with_text_arguments, _with_list_content)]
    dropped = []
    for form in forms:
        text = template.try_render([*form[:known], *_probes(form[known:])], add_generation_prompt=True)
        missing = _first_missing(text, new) if text is not None else None
        if text is not None and missing is None:
            return form
        dropped += [known + missing] if missing is not None else []
    if not dropped:
        form = next((form for form in forms if template.try_render(form[:known]) is not None), forms[0])
        template.render([*form[:known], *_probes(form[known:])], add_generation_prompt=True)
    message = messages[dropped[0]]
    raise DataError(
        f"chat template of {template.name!r} drops message {dropped[0]} (role {message['role']!r}) of "
        f"{len(messages)}: its content {str(message.get('content'))[:_TEXT_SHOWN]!r} is not in the rendered text. "
        "Use a template that prints messages of this role, or send it as a message of role 'user'"
    )


def _probes(messages: Sequence[Message]) -> list[Message]:
    """The messages with numbered markers as contents, but for those of the assistant."""
    return [
        message if message["role"] == "assistant" else _with_content(message, _NEW_MARKER.format(number))
        for number, message in enumerate(messages)
    ]


def _first_missing(text: str, numbers: Sequence[int]) -> int | None:
    """The first of the numbered markers that does not stand in a text; None if they all do."""
    return next((number for number in numbers if _NEW_MARKER.format(number) not in text), None)


def _with_content(message: Message, text: str) -> Message:
    """The message with another text, as a list of one part if its content is a list."""
    is_list = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if is_list else text}


def _with_list_content(message: Message) -> Message:
    """The message with its text as a list of one part, which some templates demand."""
    content: Any = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text, which some templates demand."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    as_text = [_map_arguments(call, _text_arguments) for call in calls]
    return {**message, "tool_calls": as_text}


def _text_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _marked_arguments(arguments: Any) -> Any:
    marked = {"name": MARKER}
    return json.dumps(marked) if isinstance(arguments, str) else marked


def _map_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    changed = {**function, "arguments": change(function.get("arguments"))}
    return {**call, "function": changed} if "function" in call else changed


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in REASONING_FIELDS}


def _stop(template: ChatTemplate, turn: Turn) -> str | None:
    """The special token that a completion ended with; None if it was cut off, or ended with other text."""
    completion = turn.completion
    if completion.finish_reason != "stop" or not completion.token_ids:
        return None
    token: str = template.tokenizer.convert_ids_to_tokens(completion.token_ids[-1])
    is_added = token in template.special_tokens or token in template.tokenizer.get_added_vocab()
    return token if is_added else None


def said_text(template: ChatTemplate, turn: Turn) -> str:
    """The text of a completion, without the token that ended it."""
    token_ids = turn.completion.token_ids
    if _stop(template, turn) is not None:
        token_ids = token_ids[:-1]
    # Some tokenizers drop a space at the start of a text, where a completion does not stand.
    before = _decode(template, turn.sent_ids[-1:])
    return _decode(template, [*turn.sent_ids[-1:], *token_ids]).removeprefix(before)


def _decode(template: ChatTemplate, token_ids: list[int]) -> str:
    text: str = template.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    return text


def _encode_after(template: ChatTemplate, before: str | None, text: str) -> list[int]:
    """The ids of a text that follows a special token, if any; the token decides what becomes of white space."""
    if before is None:
        return encode(text, [], template.tokenizer).token_ids
    return encode(before + text, [], template.tokenizer).token_ids[1:]
