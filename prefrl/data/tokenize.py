"""Datasets of text to datasets of token ids. Text is tokenised once; nothing is decoded and encoded again later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import datasets

from prefrl.data.chat import (
    ChatTemplate,
    EncodedText,
    Span,
    assistant_spans,
    completion_start,
    encode,
    join_prompt,
    prompt_text,
    special_tokens,
    trim_after_end_token,
)
from prefrl.data.formats import (
    Format,
    Message,
    check_not_reserved,
    convert_from_value,
    detect_format,
    read_messages,
    read_text,
    read_tools,
)
from prefrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

__all__ = ["SFT_COLUMNS", "Truncation", "completion_text", "prepare_prompt_dataset", "prepare_sft_dataset"]

logger = logging.getLogger(__name__)

Truncation = Literal["left", "right", "error"]

SFT_COLUMNS = ("input_ids", "trainable", "seq_lengths")
PROMPT_COLUMNS = ("prompt_ids",)

# `datasets` caches a map's result under the map's arguments and does not see a change of the code in this room:
# raise this number when the same row gives other tokens than before.
_CACHE_VERSION = 1


@dataclass(frozen=True)
class _RowEncoder:
    """All that the tokens of a row depend on besides the row."""

    dataset_format: Format
    tokenizer: PreTrainedTokenizerBase
    prefix_ids: tuple[int, ...]  # what the tokenizer puts before a plain text: BOS or nothing
    special_tokens: tuple[str, ...]
    chat_template_kwargs: Mapping[str, Any]
    max_length: int | None
    truncation: Truncation
    completion_only: bool = False
    assistant_only: bool = False
    cache_version: int = _CACHE_VERSION

    def sft_row(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        encoded = self._at_row(index, self._encode_sft, row)
        start, stop = self._kept(len(encoded.token_ids), index)
        trainable = encoded.in_span[start:stop]
        trainable[:1] = [False]  # nothing predicts a row's first token
        return {
            "input_ids": encoded.token_ids[start:stop],
            "trainable": trainable,
            "is_trained": any(trainable),
        }

    def prompt_row(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {"prompt_ids": self._at_row(index, self._encode_prompt, row)}

    def truncated_prompt_row(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        start, stop = self._kept(len(row["prompt_ids"]), index)
        return {"prompt_ids": row["prompt_ids"][start:stop]}

    def warn_without_end_token(self, row: Mapping[str, Any]) -> None:
        """Look whether a conversation ends with a special token; plain text always does."""
        if self.dataset_format.style == "standard":
            return
        token_ids = self._at_row(0, self._encode_sft, row).token_ids
        end = self.tokenizer.decode(token_ids[-8:]).rstrip()
        if not end.endswith(self.special_tokens):
            logger.warning(
                "The chat template ends the assistant's turn with %r, not with a special token: the model does not "
                "learn to stop. Use a template that puts an end token behind each turn.",
                end,
            )

    def _at_row(self, index: int, encode_row: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> Any:
        try:
            return encode_row(row)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error

    def _kept(self, length: int, index: int) -> tuple[int, int]:
        """The range of tokens that truncation keeps."""
        if self.max_length is None or length <= self.max_length:
            return 0, length
        if self.truncation == "error":
            raise DataError(
                f"row {index} has {length} tokens, more than the {self.max_length} allowed, and truncation='error'. "
                "Raise the limit, drop long rows, or set truncation to 'left' or 'right'"
            )
        return (length - self.max_length, length) if self.truncation == "left" else (0, self.max_length)

    def _encode_sft(self, row: Mapping[str, Any]) -> EncodedText:
        if self.dataset_format.style == "conversational":
            return self._encode_conversation(row)
        texts = [read_text(row, column) for column in self.dataset_format.columns]
        text = "".join(texts)
        start = len(texts[0]) if self.completion_only else 0
        body = encode(text, [Span(start, len(text))], self.tokenizer)
        prefix = self._prefix(text)
        # Without an end-of-text token a model never learns to stop.
        end = [] if body.token_ids[-1:] == [self.tokenizer.eos_token_id] else [self.tokenizer.eos_token_id]
        return EncodedText(
            [*prefix, *body.token_ids, *end],
            [*([not self.completion_only] * len(prefix)), *body.in_span, *([True] * len(end))],
        )

    def _encode_conversation(self, row: Mapping[str, Any]) -> EncodedText:
        template = self._template(row)
        parts = [read_messages(row, column) for column in self.dataset_format.columns]
        prompt = parts[0] if len(parts) == 2 else None
        conversation = join_prompt(prompt, parts[1]) if prompt is not None else parts[0]
        text = template.render(conversation)
        spans = self._spans(template, prompt, conversation, text)
        return encode(text, spans, self.tokenizer)

    def _spans(
        self, template: ChatTemplate, prompt: Sequence[Message] | None, conversation: Sequence[Message], text: str
    ) -> list[Span]:
        start = completion_start(template, prompt, conversation, text) if prompt and self.completion_only else 0
        if not self.assistant_only:
            whole = Span(start, len(text))
            return [trim_after_end_token(whole, text, self.special_tokens)] if start else [whole]
        spans = assistant_spans(template, conversation, text)
        return [Span(max(span.start, start), span.stop) for span in spans if span.stop > start]

    def _encode_prompt(self, row: Mapping[str, Any]) -> list[int]:
        column = self.dataset_format.columns[0]
        if self.dataset_format.style == "conversational":
            token_ids = encode(
                prompt_text(self._template(row), read_messages(row, column)), [], self.tokenizer
            ).token_ids
        else:
            text = read_text(row, column)
            token_ids = [*self._prefix(text), *encode(text, [], self.tokenizer).token_ids]
        if not token_ids:
            raise DataError(f"column {column!r}: the prompt {row[column]!r} has no tokens. Correct or drop the row")
        return token_ids

    def _prefix(self, text: str) -> tuple[int, ...]:
        # Text that a chat template has rendered before may have its BOS already; a second one would be wrong.
        bos = self.tokenizer.bos_token
        return () if bos and text.startswith(bos) else self.prefix_ids

    def _template(self, row: Mapping[str, Any]) -> ChatTemplate:
        own = row.get("chat_template_kwargs") or {}
        kwargs = {**self.chat_template_kwargs, **{name: value for name, value in own.items() if value is not None}}
        return ChatTemplate(self.tokenizer, self.special_tokens, tools=read_tools(row), kwargs=kwargs)


def prepare_sft_dataset(  # noqa: PLR0913 - one argument for each option of SFTConfig that decides a row's tokens
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    truncation: Truncation,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    text_field: str = "text",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Tokenise a language-modelling or prompt-completion dataset and mark the tokens that have a loss.

    Plain text gets an EOS token at its end unless it has one; conversations end as the chat template ends them. The
    columns `tools` and `chat_template_kwargs` of a row are given to the template. Rows that have no token to train on
    are dropped with one warning.

    Args:
        dataset: Map-style, with one of the formats of `prefrl.data.formats`.
        tokenizer: With an EOS token, and for conversations with a chat template.
        max_length: Tokens of a row; None: no limit.
        truncation: Side that is cut off, or "error".
        completion_only_loss: Only the completion has a loss. None: exactly if the dataset is prompt-completion.
        assistant_only_loss: Only what the assistant writes has a loss (in the completion, if both are set).
        text_field: Column of standard language modelling.
        chat_template_kwargs: For the template of all rows.
        num_proc: Processes that tokenise.
    Returns:
        Columns `input_ids: list[int]` and `trainable: list[bool]`, equally long; the first flag of a row is False.
    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A row cannot be used, or no row is left.
    """
    dataset_format = detect_format(dataset, ("language_modeling", "prompt_completion"), text_field=text_field)
    check_not_reserved(dataset, SFT_COLUMNS)
    is_paired = dataset_format.kind == "prompt_completion"
    _check_loss_options(dataset_format, completion_only_loss, assistant_only_loss)
    if dataset_format.style == "standard" and tokenizer.eos_token_id is None:
        raise DataError("tokenizer has no eos_token: the model could not learn to stop. Set tokenizer.eos_token")
    encoder = replace(
        _row_encoder(dataset_format, tokenizer, max_length, truncation, chat_template_kwargs),
        completion_only=is_paired if completion_only_loss is None else completion_only_loss,
        assistant_only=assistant_only_loss,
    )
    dataset = convert_from_value(dataset, dataset_format)
    encoder.warn_without_end_token(dataset[0])
    rows = dataset.map(
        encoder.sft_row,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=datasets.Features(
            input_ids=datasets.List(datasets.Value("int32")),
            trainable=datasets.List(datasets.Value("bool")),
            is_trained=datasets.Value("bool"),
        ),
        num_proc=num_proc,
        desc="Tokenizing",
    )
    reason = "no token to train on" + (f" within max_length={max_length}" if max_length is not None else "")
    remedy = "Raise max_length, cut the other side, or loosen completion_only_loss / assistant_only_loss"
    return _drop(rows, keep=rows["is_trained"][:], reason=reason, remedy=remedy).remove_columns("is_trained")


def prepare_prompt_dataset(
    dataset: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int | None,
    truncation: Truncation = "left",
    filter_overlong: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Tokenise the column `prompt` as generation reads it.

    A conversational prompt ends with the header of an assistant's turn, or, if its last message is an assistant's, in
    the middle of that turn.

    Args:
        dataset: Map-style, with text or messages in `prompt`, and any other columns.
        tokenizer: For conversations with a chat template.
        max_prompt_length: Tokens of a prompt; None: no limit.
        truncation: Side of longer prompts that is cut off, or "error".
        filter_overlong: Drop longer prompts with a warning instead of truncating them.
        chat_template_kwargs: For the template of all rows; a row's own column of that name goes first.
        num_proc: Processes that tokenise.
    Returns:
        All columns, and `prompt_ids: list[int]`.
    Raises:
        ConfigError: `filter_overlong` without a limit.
        DataError: A row cannot be used, or no row is left.
    """
    if filter_overlong and max_prompt_length is None:
        raise ConfigError("filter_overlong=True has no effect without max_prompt_length. Set max_prompt_length")
    dataset_format = detect_format(dataset, ("prompt_only",))
    check_not_reserved(dataset, PROMPT_COLUMNS)
    encoder = _row_encoder(dataset_format, tokenizer, max_prompt_length, truncation, chat_template_kwargs)
    dataset = convert_from_value(dataset, dataset_format)
    features = datasets.Features({**dataset.features, "prompt_ids": datasets.List(datasets.Value("int32"))})
    rows = dataset.map(
        encoder.prompt_row, with_indices=True, features=features, num_proc=num_proc, desc="Tokenizing prompts"
    )
    if max_prompt_length is None:
        return rows
    fits = [len(prompt_ids) <= max_prompt_length for prompt_ids in rows["prompt_ids"]]
    if all(fits):
        return rows
    if filter_overlong:
        reason = f"a prompt of more than max_prompt_length={max_prompt_length} tokens"
        return _drop(rows, keep=fits, reason=reason, remedy="Raise max_prompt_length, or set filter_overlong=False")
    return rows.map(
        encoder.truncated_prompt_row, with_indices=True, features=features, num_proc=num_proc, desc="Truncating"
    )


def completion_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], conversational: bool
) -> str | list[Message]:
    """A completion as rewards see it: its text without special tokens, or one assistant message with that text."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return [{"role": "assistant", "content": text}] if conversational else text


def _check_loss_options(dataset_format: Format, completion_only: bool | None, assistant_only: bool) -> None:
    if completion_only and dataset_format.kind != "prompt_completion":
        raise ConfigError(
            f"completion_only_loss=True: the dataset has columns {list(dataset_format.columns)} and no completion. "
            "Give columns 'prompt' and 'completion', use assistant_only_loss=True for conversations, or leave it None"
        )
    if assistant_only and dataset_format.style != "conversational":
        raise ConfigError(
            f"assistant_only_loss=True: columns {list(dataset_format.columns)} hold text, not messages. "
            "Give lists of messages, or set assistant_only_loss=False"
        )


def _row_encoder(
    dataset_format: Format,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    truncation: Truncation,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> _RowEncoder:
    if max_length is not None and max_length < 1:
        raise ConfigError(f"a limit of {max_length} tokens: needs >= 1, or None for no limit")
    return _RowEncoder(
        dataset_format=dataset_format,
        tokenizer=tokenizer,
        prefix_ids=_prefix_ids(tokenizer),
        special_tokens=special_tokens(tokenizer),
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        max_length=max_length,
        truncation=truncation,
    )


def _prefix_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text; those that it puts behind belong to no prompt."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    with_special = list(tokenizer("a")["input_ids"])
    starts = range(len(with_special) - len(plain) + 1)
    start = next((i for i in starts if with_special[i : i + len(plain)] == plain), 0)
    return tuple(with_special[:start])


def _drop(rows: datasets.Dataset, *, keep: Sequence[bool], reason: str, remedy: str) -> datasets.Dataset:
    dropped = [index for index, is_kept in enumerate(keep) if not is_kept]
    if not dropped:
        return rows
    if len(dropped) == len(keep):
        raise DataError(f"all {len(keep)} rows have {reason}. {remedy}")
    logger.warning(
        "%d of %d rows have %s and are dropped (the first is row %d). %s",
        len(dropped), len(keep), reason, dropped[0], remedy,
    )  # fmt: skip
    return rows.select([index for index, is_kept in enumerate(keep) if is_kept])
