"""Render chat templates, and find the assistant's tokens by comparing renderings.

No template is known by name. To find where a turn starts and stops in the rendered conversation, parts of the
conversation are rendered separately. If the template renders a part differently than the whole (for example, because
it drops earlier thinking), the text of the turn is replaced by a marker instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from prefrl.data.formats import REASONING_FIELDS
from prefrl.errors import DataError
from prefrl.pictures import in_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from prefrl.data.formats import Message
    from prefrl.data.images import ImageReader

    ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

# Stands for a text where the place of the text in a rendering is looked for.
MARKER = "prefrlTurnContentMarker"


@dataclass(frozen=True)
class Span:
    """Characters `start` to `stop` (exclusive) of a rendered text."""

    start: int
    stop: int


@dataclass(frozen=True)
class EncodedText:
    """A text's tokens and, for each, whether it belongs to one of the spans asked for; an image's tokens never do."""

    token_ids: list[int]
    in_span: list[bool]
    image_stop: int = 0  # number of tokens up to the end of the last image
    unexpanded_ids: list[int] = field(default_factory=list)  # one placeholder for each image; empty without images


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, with everything else that a rendering depends on besides the messages."""

    tokenizer: PreTrainedTokenizerBase
    special_tokens: tuple[str, ...]  # as returned by `special_tokens`; stored because that function is slow
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None
    kwargs: Mapping[str, Any] | None = None
    reader: ImageReader | None = None  # of a vision-language model, whose template reads contents as lists of blocks
    images: Sequence[Any] = ()  # of the conversation, in the order of their placeholders

    def encode(self, text: str, spans: Sequence[Span]) -> EncodedText:
        """Tokenize a rendered conversation, see `encode`; each placeholder becomes the tokens of its image.

        Raises:
            DataError: The images cannot be read, or do not fit the placeholders.
        """
        if self.reader is None or not self.images:
            return encode(text, spans, self.tokenizer)
        expanded = self.reader.expand(text, self.images)
        borders = [(span.start or -1, span.stop) for span in spans]
        tokens = list(zip(expanded.stops, expanded.is_image, strict=True))
        in_span = [not is_image and any(start < stop <= end for start, end in borders) for stop, is_image in tokens]
        last = max((i for i, is_image in enumerate(expanded.is_image) if is_image), default=-1)
        unexpanded = encode(text, [], self.tokenizer).token_ids
        return EncodedText(expanded.token_ids, in_span, last + 1, unexpanded)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: The conversation.
            add_generation_prompt: End with the header of an assistant's turn.
            continue_final_message: Leave the last turn open, so that generation continues it.
        Raises:
            DataError: The tokenizer has no chat template, or the template raises; names template and turn.
        """
        if self.tokenizer.chat_template is None and "chat_template" not in (self.kwargs or {}):
            raise DataError(
                f"tokenizer {self.name!r} has no chat template, but the dataset is conversational. Set "
                "tokenizer.chat_template, use the tokenizer of an instruction-tuned model, or use plain text"
            )
        try:
            return self._apply(messages, add_generation_prompt, continue_final_message)
        except Exception as error:  # a template is a program that came with the tokenizer: it may raise anything
            turn = self._failing_turn(messages, str(error))
            raise DataError(
                f"chat template of {self.name!r} failed at message {turn} "
                f"(role {messages[turn]['role']!r}) of {len(messages)}: {type(error).__name__}: {error}. "
                "Change the conversation, the template or chat_template_kwargs"
            ) from error

    def try_render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """The text of a part of a conversation; None if the template does not accept the part on its own."""
        try:
            return self._apply(messages, add_generation_prompt, False)
        except Exception:  # see render; many templates refuse no messages, or a last message of some role
            return None

    @property
    def name(self) -> str:
        """How messages call the template: the name of its tokenizer."""
        return str(self.tokenizer.name_or_path or type(self.tokenizer).__name__)

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages) if self.reader is None else [in_blocks(message) for message in messages],
            tools=list(self.tools) if self.tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(self.kwargs or {}),
        )
        return text

    def _failing_turn(self, messages: Sequence[Message], reason: str) -> int:
        for turn in range(len(messages)):
            try:
                self._apply(messages[: turn + 1], False, False)
            except Exception as error:  # find the turn that causes the error to report
                if str(error) == reason:
                    return turn
        return len(messages) - 1


def prompt_text(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """A prompt as generation reads it: it ends with the header of an assistant's turn, or inside its last such turn.

    Raises:
        DataError: The prompt cannot be rendered.
    """
    if messages[-1]["role"] == "assistant":
        return template.render(messages, continue_final_message=True)
    return template.render(messages, add_generation_prompt=True)


def join_prompt(prompt: Sequence[Message], completion: Sequence[Message]) -> list[Message]:
    """Join a prompt and its completion into one conversation.

    If the prompt ends with an assistant's turn, the first message of the completion continues that turn.

    Raises:
        DataError: The completion does not start with an assistant's turn, or cannot continue the prompt's last one.
    """
    if completion[0]["role"] != "assistant":
        raise DataError(
            f"the completion starts with role {completion[0]['role']!r}: must be 'assistant'. Move messages that the "
            "model does not write into the prompt"
        )
    if prompt[-1]["role"] != "assistant":
        return [*prompt, *completion]
    opening, rest = prompt[-1], completion[0]
    if not isinstance(opening.get("content"), str) or not isinstance(rest.get("content"), str):
        raise DataError(
            "column 'prompt' ends with an assistant message that the completion continues: the content of both "
            "messages must be a str"
        )
    joined = {**opening, **rest, "content": opening["content"] + rest["content"]}
    return [*prompt[:-1], joined, *completion[1:]]


def completion_start(
    template: ChatTemplate, prompt: Sequence[Message], conversation: Sequence[Message], text: str
) -> int:
    """The character of `text` at which a completion starts.

    Raises:
        DataError: Neither the rendered prompt nor the turn's own content shows where; names the turn.
    """
    continues = prompt[-1]["role"] == "assistant"
    opening = prompt_text(template, prompt)
    if text.startswith(opening):
        return len(opening)
    start = None if continues else _turn_start(template, conversation, len(prompt), text)
    if start is None:
        raise DataError(_not_found_message(template, conversation, len(prompt) - continues))
    return start


def assistant_spans(template: ChatTemplate, conversation: Sequence[Message], text: str) -> list[Span]:
    """The spans of a rendered conversation that the assistant writes, each with the token that ends it.

    Raises:
        DataError: A turn cannot be found; names it.
    """
    turns = [turn for turn, message in enumerate(conversation) if message["role"] == "assistant"]
    return [_turn_span(template, conversation, turn, text) for turn in turns]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """All special tokens: the named ones (bos, eos, ...) and the other added ones that are marked special."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def trim_after_end_token(span: Span, text: str, special_tokens: tuple[str, ...]) -> Span:
    """Cut white space that follows a special token at the end of a span: generation stops before writing it."""
    stripped = text[span.start : span.stop].rstrip()
    return Span(span.start, span.start + len(stripped)) if stripped.endswith(special_tokens) else span


def last_special(text: str, special_tokens: tuple[str, ...]) -> Span | None:
    """The special token that stops last in a text; None if there is none."""
    spans = [Span(text.rfind(token), text.rfind(token) + len(token)) for token in special_tokens if token in text]
    return max(spans, key=lambda span: span.stop, default=None)


def encode(text: str, spans: Sequence[Span], tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    """Tokenize a text once, without adding special tokens, and mark the tokens of some spans.

    A token that crosses the start of a span is marked, because no other token holds the span's first characters. A
    token that crosses its end is not.

    Args:
        text: All of it.
        spans: Characters of `text`.
        tokenizer: Fast tokenizers return character offsets; with slow ones, the text up to each border is encoded.
    """
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair, which a tool may say, has no tokens
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        token_ids = list(encoded["input_ids"])
        stops = [stop for _, stop in encoded["offset_mapping"]]
        # A token without characters, such as a dummy prefix at 0, belongs to a span that starts there.
        borders = [(span.start or -1, span.stop) for span in spans]
        in_span = [any(start < stop <= end for start, end in borders) for stop in stops]
        return EncodedText(token_ids, in_span)
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ranges = [range(*(_token_at(c, text, token_ids, tokenizer) for c in (span.start, span.stop))) for span in spans]
    return EncodedText(token_ids, [any(i in tokens for tokens in ranges) for i in range(len(token_ids))])


def _turn_span(template: ChatTemplate, conversation: Sequence[Message], turn: int, text: str) -> Span:
    start = _turn_start(template, conversation, turn, text)
    stop = _turn_stop(template, conversation, turn, text)
    if start is None or stop is None or start >= stop:
        raise DataError(_not_found_message(template, conversation, turn))
    return trim_after_end_token(Span(start, stop), text, template.special_tokens)


def _turn_start(template: ChatTemplate, conversation: Sequence[Message], turn: int, text: str) -> int | None:
    """Where generation would start to write the turn; if unknown, where the text that the turn adds starts."""
    opening = template.try_render(conversation[:turn], add_generation_prompt=True)
    if opening is not None and text.startswith(opening):
        return len(opening)
    before, found, _ = _render_marked(template, conversation, turn).partition(MARKER)
    return len(before) if found and text.startswith(before) else None


def _turn_stop(template: ChatTemplate, conversation: Sequence[Message], turn: int, text: str) -> int | None:
    """Where the conversation up to the turn stops; else after its content and end token; else after its tail."""
    through = template.try_render(conversation[: turn + 1])
    if through is not None and text.startswith(through):
        return len(through)
    _, found, after = _render_marked(template, conversation, turn).rpartition(MARKER)
    if found and text.endswith(after):
        alone = _render_marked(template, conversation[: turn + 1], turn).rpartition(MARKER)[2]
        # What follows the content whether or not the conversation goes on. It may include characters that the next
        # header happens to share with an end-of-text token, such as `<|` of `<|user|>` and `<|endoftext|>`.
        ending = after[: common_prefix_length(after, alone)]
        end = last_special(ending, template.special_tokens)
        return len(text) - len(after) + (end.stop if end else len(ending))
    start = _turn_start(template, conversation, turn, text)
    if through is None or start is None:
        return None
    tail = _overlap(through, text[start:])
    # Anything shorter than the turn's end token may match by chance.
    ending = through.rstrip()
    ends = [len(token) for token in template.special_tokens if ending.endswith(token)]
    return start + tail if ends and tail >= max(ends) + len(through) - len(ending) else None


def _render_marked(template: ChatTemplate, conversation: Sequence[Message], turn: int) -> str:
    """The conversation with a marker as the text of one turn; empty if the template refuses it."""
    message = conversation[turn]
    texts = [name for name in ("content", *REASONING_FIELDS) if isinstance(message.get(name), str)]
    marked = {**message, **dict.fromkeys(texts or ["content"], MARKER)}
    return template.try_render([*conversation[:turn], marked, *conversation[turn + 1 :]]) or ""


def _overlap(first: str, second: str) -> int:
    """The length of the longest text that `first` ends with and `second` starts with."""
    starts = range(max(0, len(first) - len(second)), len(first))
    return next((len(first) - start for start in starts if second.startswith(first[start:])), 0)


def _not_found_message(template: ChatTemplate, conversation: Sequence[Message], turn: int) -> str:
    return (
        f"chat template of {template.name!r}: cannot tell which "
        f"tokens belong to message {turn} (role {conversation[turn]['role']!r}) of {len(conversation)}: the template "
        "renders it differently when the conversation ends there, and does not print its content as a whole. "
        "Use a template that keeps earlier turns as they are, set chat_template_kwargs that match the conversation, "
        "or train on all tokens"
    )


def _token_at(character: int, text: str, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of leading tokens that the text up to a character has in common with the whole text."""
    head = tokenizer(text[:character], add_special_tokens=False, verbose=False)["input_ids"]
    return common_prefix_length(head, token_ids)


def common_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of leading items that two sequences have in common."""
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)
