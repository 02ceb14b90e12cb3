"""Encode the text or messages of a row as token ids. All dataset preparations use this; text is tokenized once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from prefrl.data.chat import (
    ChatTemplate,
    EncodedText,
    Span,
    completion_start,
    encode,
    special_tokens,
    trim_after_end_token,
)
from prefrl.data.checks import last_written
from prefrl.data.formats import AnyDataset, Format, Message, read_messages, read_tools
from prefrl.data.images import (
    IMAGE_FEATURES,
    ImageReader,
    ProcessingClass,
    image_column,
    image_reader,
    tokenizer_of,
    with_stored_images,
)
from prefrl.data.packing import EncodeRow
from prefrl.distributed import is_main
from prefrl.errors import ConfigError, DataError
from prefrl.pictures import has_images, images_of, with_placeholders

logger = logging.getLogger(__name__)

TruncationSide = Literal["left", "right", "error"]
Found = TypeVar("Found")

# `datasets` caches the result of a map under its arguments and does not notice changes to the code of this package.
# Increase this number when a row gives other tokens than before, or none.
_CACHE_VERSION = 3
# How many rows are tried to find out how rows begin and end.
_ROWS_LOOKED_AT = 10
# How many ids of the beginning or the end of a row a warning shows.
_TOKENS_SHOWN = 8


@dataclass(frozen=True)
class EncodedPair:
    """The tokens of a prompt and a completion, tokenized together. The completion begins at `start`."""

    token_ids: list[int]
    start: int
    image_stop: int = 0  # number of tokens up to the end of the last image


@dataclass(frozen=True)
class RowEncoder:
    """Encodes texts and conversations; holds everything that the tokens depend on besides the text itself."""

    tokenizer: PreTrainedTokenizerBase
    is_conversational: bool
    prefix_ids: tuple[int, ...]  # what the tokenizer puts before a plain text: BOS or nothing
    special_tokens: tuple[str, ...]
    chat_template_kwargs: Mapping[str, Any]
    # Schemas of the tools of all rows, by the value of the column `environment`; None: they do not depend on it. If
    # there are none, the tools are those in the column `tools`.
    tools: Mapping[str | None, Sequence[Mapping[str, Any]]] | None = None
    reader: ImageReader | None = None  # of a vision-language model
    opening: tuple[str, ...] = ()  # columns whose messages open a conversation, where images may stand
    cache_version: int = _CACHE_VERSION

    def document(self, text: str, *, start: int = 0) -> EncodedText:
        """Encode plain text between the tokenizer's prefix and EOS, and mark the tokens from a character on."""
        body = encode(text, [Span(start, len(text))], self.tokenizer)
        prefix = self.prefix(text)
        # Without an end-of-text token a model never learns to stop.
        end = [] if body.token_ids[-1:] == [self.tokenizer.eos_token_id] else [self.tokenizer.eos_token_id]
        return EncodedText(
            [*prefix, *body.token_ids, *end],
            [*([start == 0] * len(prefix)), *body.in_span, *([True] * len(end))],
        )

    def text_pair(self, prompt: str, completion: str) -> EncodedPair:
        """Encode a plain prompt and completion with EOS. A token that crosses the border belongs to the completion."""
        encoded = self.document(prompt + completion, start=len(prompt))
        return EncodedPair(encoded.token_ids, encoded.in_span.index(True))

    def chat_pair(
        self, template: ChatTemplate, prompt: Sequence[Message], conversation: Sequence[Message]
    ) -> EncodedPair:
        """Encode a conversation that begins with a prompt, up to the token that ends its last turn.

        Raises:
            DataError: The template fails, does not show where the completion starts, or gives it no tokens.
        """
        text = template.render(conversation)
        span = Span(completion_start(template, prompt, conversation, text), len(text))
        encoded = template.encode(text, [trim_after_end_token(span, text, self.special_tokens)])
        if not any(encoded.in_span):
            raise DataError("the completion has no tokens once the chat template is applied")
        stop = len(encoded.in_span) - encoded.in_span[::-1].index(True)
        return EncodedPair(encoded.token_ids[:stop], encoded.in_span.index(True), encoded.image_stop)

    def prefix(self, text: str) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before this text."""
        # Text that was already rendered with a chat template may contain its BOS; a second one would be wrong.
        bos = self.tokenizer.bos_token
        return () if bos and text.startswith(bos) else self.prefix_ids

    def template(self, row: Mapping[str, Any]) -> ChatTemplate:
        """The chat template with the tools and arguments of a row.

        Raises:
            DataError: The row's tools cannot be read, or it names an environment that does not exist.
        """
        own = row.get("chat_template_kwargs") or {}
        kwargs = {**self.chat_template_kwargs, **{name: value for name, value in own.items() if value is not None}}
        return ChatTemplate(
            self.tokenizer,
            self.special_tokens,
            tools=read_tools(row) if self.tools is None else of_environment(row, self.tools),
            kwargs=kwargs,
            reader=self.reader,
            images=self.images(row),
        )

    def images(self, row: Mapping[str, Any]) -> list[Any]:
        """The images of a row as they are stored."""
        return [] if self.reader is None else images_of(row, self.opening[0])

    def messages(self, row: Mapping[str, Any], column: str, *, allow_empty: bool = False) -> list[Message]:
        """The messages of a cell, see `read_messages`; those that open a conversation with placeholders for images.

        Raises:
            DataError: The messages cannot be used, or do not fit the images of the row.
        """
        messages = read_messages(row, column, allow_empty=allow_empty)
        if self.reader is not None and column in self.opening:
            return with_placeholders(messages, len(self.images(row)), column)
        if has_images(messages):
            place = f"they are allowed in column {self.opening[0]!r}" if self.reader else "the model reads text only"
            raise DataError(f"column {column!r} holds images: {place}. Remove them, or drop the row")
        return messages

    def with_images(self, encode_row: EncodeRow) -> tuple[EncodeRow, Mapping[str, Any]]:
        """`encode_row` with the images of the row as another column, and that column, if the model reads images."""
        return (encode_row, {}) if self.reader is None else (_WithImages(self, encode_row), IMAGE_FEATURES)

    def check_end_of_text(self) -> None:
        """Refuse plain text for a tokenizer without EOS.

        Raises:
            DataError: There is none.
        """
        if not self.is_conversational and self.tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no eos_token, without which the model cannot learn to stop. Set tokenizer.eos_token"
            )

    def warn_of_special_tokens(
        self,
        dataset: AnyDataset,
        encode_row: Callable[[Mapping[str, Any]], list[int]],
        *,
        learns_to_stop: bool = True,
    ) -> None:
        """Warn of a BOS or an end token that stands twice, and of conversations that do not end with a special token.

        Args:
            dataset: Its first row that can be encoded is checked.
            encode_row: Returns the tokens of a row without truncation.
            learns_to_stop: Whether a model learns to write the end of these tokens.
        """
        for index, row in enumerate(islice(dataset, _ROWS_LOOKED_AT)):
            try:
                token_ids = encode_row(row)
            except DataError:  # reported, with all rows like it, when the dataset is mapped
                continue
            for problem in self._odd_tokens(token_ids, learns_to_stop) if is_main() else ():
                logger.warning("Row %d of the dataset %s", index, problem)
            return

    def _odd_tokens(self, token_ids: list[int], learns_to_stop: bool) -> Iterator[str]:
        start, end = token_ids[:_TOKENS_SHOWN], token_ids[-_TOKENS_SHOWN:]
        bos = self.tokenizer.bos_token_id
        if bos is not None and start[:2] == [bos, bos]:
            yield (
                f"starts with bos_token {self.tokenizer.bos_token!r} twice (first ids {start}). Remove it from the "
                "data or from the chat template."
            )
        written = last_written(end, self.tokenizer)
        last = self.tokenizer.convert_ids_to_tokens(written[-1:])
        is_special = set(last) <= set(self.special_tokens)
        if is_special and len(written) > 1 and written[-1] == written[-2]:
            yield f"ends with {last[0]!r} twice (last ids {end}). Remove it from the data or from the chat template."
        if learns_to_stop and self.is_conversational and not is_special:
            yield (
                f"ends with {self.tokenizer.decode(end)!r} (last ids {end}) once the chat template is applied, "
                "and not with a special token, so the model does not learn to stop. Use a template that puts an end "
                "token after each turn."
            )


@dataclass(frozen=True)
class _WithImages:
    """Encodes a row and keeps its images."""

    encoder: RowEncoder
    encode_row: EncodeRow

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.encode_row(row), "images": self.encoder.images(row)}


def of_environment(row: Mapping[str, Any], found: Mapping[str | None, Found]) -> Found:
    """What belongs to the environment that a row names in its column `environment`; None: the only environment.

    Raises:
        DataError: There is no such environment.
    """
    if None in found:
        return found[None]
    name = row.get("environment")
    if name not in found:
        raise DataError(
            f"column 'environment' of a row is {name!r}: must be one of those in environment_factory, "
            f"{sorted(map(str, found))}"
        )
    return found[name]


def row_encoder(
    dataset_format: Format,
    processing_class: ProcessingClass,
    chat_template_kwargs: Mapping[str, Any] | None,
    tools: Mapping[str | None, Sequence[Mapping[str, Any]]] | None = None,
) -> RowEncoder:
    """The encoder for rows of a format; see `RowEncoder` for the arguments.

    Raises:
        DataError: The rows are conversations and there is no chat template.
    """
    is_conversational = dataset_format.style == "conversational"
    tokenizer, kwargs = tokenizer_of(processing_class), dict(chat_template_kwargs or {})
    own_template = getattr(processing_class, "chat_template", None)
    if is_conversational and own_template is None and tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {str(tokenizer.name_or_path)!r} has no chat template, but columns "
            f"{list(dataset_format.columns)} hold messages. Set the option chat_template_path, such as to chatml, or "
            "tokenizer.chat_template; or use plain text"
        )
    reader = image_reader(processing_class)
    if reader is not None and isinstance(own_template, str):
        kwargs = {"chat_template": own_template, **kwargs}
    columns = dataset_format.columns
    # Ids that the tokenizer appends to a text are not part of a prompt.
    plain, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    starts = range(len(whole) - len(plain) + 1)
    return RowEncoder(
        tokenizer=tokenizer,
        is_conversational=is_conversational,
        prefix_ids=tuple(whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]),
        special_tokens=special_tokens(tokenizer),
        chat_template_kwargs=kwargs,
        tools=tools,
        reader=reader if is_conversational else None,
        opening=columns[:2] if columns[0] == "chosen" else columns[:1],
    )


def with_readable_images(dataset: AnyDataset, encoder: RowEncoder) -> AnyDataset:
    """The dataset with its images as they are stored, see `with_stored_images`.

    Raises:
        DataError: It has images, and the encoder reads none.
    """
    if encoder.reader is not None:
        return with_stored_images(dataset)
    column = image_column(dataset)
    if column is not None:
        remedy = f"or remove the column: dataset.remove_columns({column!r})"
        if encoder.is_conversational:
            raise DataError(
                f"column {column!r} holds images, but processing_class is a tokenizer, which reads text only. Use a "
                f"vision-language model and its processor, {remedy}"
            )
        raise DataError(
            f"column {column!r} holds images, which belong in messages, but the dataset holds text. Use lists of "
            f'messages, such as [{{"role": "user", "content": "..."}}], {remedy}'
        )
    return dataset


def check_limit(max_length: int | None) -> None:
    """Refuse a limit that leaves no token.

    Raises:
        ConfigError: It is below 1.
    """
    if max_length is not None and max_length < 1:
        raise ConfigError(f"a limit of {max_length} tokens: must be at least 1, or None for no limit")


def kept(length: int, max_length: int | None, truncation: TruncationSide, image_stop: int = 0) -> slice:
    """The tokens of a row that truncation keeps.

    Args:
        length: Number of tokens.
        max_length: The limit; None: there is none.
        truncation: The side that is cut off.
        image_stop: Number of tokens up to the end of the last image; none of them may be cut off.
    Raises:
        DataError: The row is longer than the limit, and may not be truncated.
    """
    if max_length is None or length <= max_length:
        return slice(0, length)
    if image_stop > (max_length if truncation == "right" else 0):
        raise DataError(
            f"has {length} tokens, more than the {max_length} allowed, and images, which are never cut off. Raise the "
            "limit, or make the images smaller in the processor"
        )
    if truncation == "error":
        raise DataError(f"has {length} tokens, more than the {max_length} allowed, and truncation='error'")
    return slice(length - max_length, length) if truncation == "left" else slice(0, max_length)
