"""Tokenize text datasets for supervised fine-tuning, and prompts for generation.

Text is tokenized once; nothing is decoded and encoded again later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from prefrl.data.chat import (
    ChatTemplate,
    EncodedText,
    Span,
    assistant_spans,
    completion_start,
    encode,
    join_prompt,
    prompt_text,
    trim_after_end_token,
)
from prefrl.data.checks import num_ids_of, read_flags, read_ids, read_labels, with_lists
from prefrl.data.encode import RowEncoder, TruncationSide, check_limit, kept, row_encoder, with_readable_images
from prefrl.data.formats import (
    AnyDataset,
    Format,
    Message,
    check_answered,
    check_not_reserved,
    convert_from_value,
    detect_format,
    get_dataset_column_names,
    has_columns,
    read_text,
)
from prefrl.data.images import ProcessingClass, image_column, tokenizer_of
from prefrl.data.packing import EncodeRow, InvalidRows, drop_rows, map_rows
from prefrl.errors import ConfigError, DataError

__all__ = ["SFT_COLUMNS", "TruncationSide", "decoded_completion", "prepare_prompt_dataset", "prepare_sft_dataset"]

SFT_COLUMNS = ("input_ids", "trainable", "seq_lengths")


@dataclass(frozen=True)
class _SFTRow:
    """The tokens of a row, and flags for those that have a loss."""

    encoder: RowEncoder
    columns: tuple[str, ...]
    max_length: int | None
    truncation: TruncationSide
    completion_only: bool
    assistant_only: bool

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        encoded = self._encode(row)
        return _trained_part(encoded, self.max_length, self.truncation)

    def token_ids(self, row: Mapping[str, Any]) -> list[int]:
        """The row's tokens without truncation."""
        return self._encode(row).token_ids

    def _encode(self, row: Mapping[str, Any]) -> EncodedText:
        if self.encoder.is_conversational:
            return self._encode_conversation(row)
        texts = [read_text(row, column) for column in self.columns]
        return self.encoder.document("".join(texts), start=len(texts[0]) if self.completion_only else 0)

    def _encode_conversation(self, row: Mapping[str, Any]) -> EncodedText:
        template = self.encoder.template(row)
        parts = [self.encoder.messages(row, column) for column in self.columns]
        prompt = parts[0] if len(parts) == 2 else None
        if prompt is None:
            check_answered(parts[0], self.columns[0])
        conversation = join_prompt(prompt, parts[1]) if prompt is not None else parts[0]
        text = template.render(conversation)
        return template.encode(text, self._spans(template, prompt, conversation, text))

    def _spans(
        self, template: ChatTemplate, prompt: Sequence[Message] | None, conversation: Sequence[Message], text: str
    ) -> list[Span]:
        start = completion_start(template, prompt, conversation, text) if prompt and self.completion_only else 0
        if not self.assistant_only:
            whole = Span(start, len(text))
            return [trim_after_end_token(whole, text, self.encoder.special_tokens)] if start else [whole]
        spans = assistant_spans(template, conversation, text)
        return [Span(max(span.start, start), span.stop) for span in spans if span.stop > start]


@dataclass(frozen=True)
class _TokenizedSFTRow:
    """The ids that a row holds, and flags for those that have a loss."""

    num_ids: int
    masks: tuple[str, ...]  # columns that mark the trained tokens: labels, or flags, all of which such a token has
    has_padding: bool
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        token_ids = read_ids(row, "input_ids", self.num_ids)
        trainable = [True] * len(token_ids)
        for column in self.masks:
            flags = read_labels(row, token_ids) if column == "labels" else read_flags(row, column, len(token_ids))
            trainable = [learned and flag for learned, flag in zip(trainable, flags, strict=True)]
        if self.has_padding:
            is_real = read_flags(row, "attention_mask", len(token_ids))
            token_ids = list(compress(token_ids, is_real))
            trainable = list(compress(trainable, is_real))
        return _trained_part(EncodedText(token_ids, trainable), self.max_length, self.truncation)


def _trained_part(encoded: EncodedText, max_length: int | None, truncation: TruncationSide) -> dict[str, Any]:
    """The columns of a prepared row, from its tokens and those that are to have a loss."""
    part = kept(len(encoded.token_ids), max_length, truncation, encoded.image_stop)
    trainable = encoded.in_span[part]
    trainable[:1] = [False]  # nothing predicts a row's first token
    if not any(trainable):
        limit = f" within max_length={max_length}" if max_length is not None else ""
        raise DataError(
            f"no token to train on{limit}. Raise max_length, truncate the other side, or turn off "
            "completion_only_loss or assistant_only_loss"
        )
    return {"input_ids": encoded.token_ids[part], "trainable": trainable}


@dataclass(frozen=True)
class _TokenizedPromptRow:
    """The ids of a prompt that a row holds, and their text for the rewards."""

    tokenizer: PreTrainedTokenizerBase
    column: str
    num_ids: int
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        token_ids = read_ids(row, self.column, self.num_ids)
        text = {} if "prompt" in row else {"prompt": self.tokenizer.decode(token_ids)}
        return {"prompt_ids": token_ids[kept(len(token_ids), self.max_length, self.truncation)], **text}


@dataclass(frozen=True)
class _PromptRow:
    """The tokens of a prompt as generation reads it."""

    encoder: RowEncoder
    column: str
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        encoded = self.encode(row)
        token_ids = encoded.token_ids
        if not token_ids:
            raise DataError(f"column {self.column!r}: the prompt {row[self.column]!r} has no tokens")
        part = kept(len(token_ids), self.max_length, self.truncation, encoded.image_stop)
        if self.encoder.reader is None:
            return {"prompt_ids": token_ids[part]}
        num_cut = len(token_ids) - part.stop  # of a prompt with images, only the end is cut off
        unexpanded = encoded.unexpanded_ids[: len(encoded.unexpanded_ids) - num_cut]
        return {"prompt_ids": token_ids[part], "unexpanded_ids": unexpanded}

    def encode(self, row: Mapping[str, Any]) -> EncodedText:
        """The prompt without truncation."""
        if self.encoder.is_conversational:
            messages = self.encoder.messages(row, self.column, allow_empty=self.encoder.tools is not None)
            template = self.encoder.template(row)
            return template.encode(prompt_text(template, messages), [])
        text = read_text(row, self.column)
        token_ids = encode(text, [], self.encoder.tokenizer).token_ids
        return EncodedText([*self.encoder.prefix(text), *token_ids], [])


def prepare_sft_dataset(  # noqa: PLR0913 - one argument for each option of SFTConfig that decides a row's tokens
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    *,
    max_length: int | None,
    truncation: TruncationSide,
    invalid_rows: InvalidRows,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    text_field: str = "text",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize a language-modeling or prompt-completion dataset and mark the tokens that have a loss.

    A dataset with a column `input_ids` is tokenized already, and only marked and truncated: `labels` says which ids
    are learned; without it, those that `assistant_masks` and, unless `completion_only_loss` is False,
    `completion_mask` mark. Ids whose `attention_mask` is 0 are padding, and left out.

    EOS is appended to plain text unless it already ends with it; conversations end as the chat template ends them. The
    columns `tools` and `chat_template_kwargs` of a row are passed to the template. A row without a token to train on,
    or without a message of the assistant, cannot be used.

    Args:
        dataset: In one of these formats of `prefrl.data.formats`; a stream is tokenized while it is read.
        processing_class: A tokenizer, or a processor if rows may have images; with an EOS token, and for conversations
            with a chat template.
        max_length: Tokens of a row; None: no limit.
        truncation: The side that is cut off; with "error", longer rows cannot be used.
        invalid_rows: What happens to rows that cannot be used, see `prefrl.data.packing.map_rows`.
        completion_only_loss: Only the completion has a loss. None: True exactly for the prompt-completion format.
        assistant_only_loss: Only what the assistant writes has a loss (in the completion, if both are set).
        text_field: Column of standard language modeling.
        chat_template_kwargs: For the template of all rows; a row's own column of that name takes precedence.
        num_proc: Number of processes that tokenize; None for a stream.
    Returns:
        Columns `input_ids: list[int]` and `trainable: list[bool]`, of equal length; the first flag of a row is False.
    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A row cannot be used, or no row is left.
    """
    check_limit(max_length)
    encode_row: EncodeRow
    images: Mapping[str, Any] = {}
    if has_columns(dataset, ("input_ids",)):
        check_not_reserved(dataset, ("trainable", "seq_lengths"))
        names = get_dataset_column_names(dataset)
        masks = _masks(names, completion_only_loss, assistant_only_loss)
        num_ids, has_padding = num_ids_of(tokenizer_of(processing_class)), "attention_mask" in names
        encode_row = _TokenizedSFTRow(num_ids, masks, has_padding, max_length, truncation)
        dataset = with_lists(dataset)
    else:
        dataset_format = detect_format(dataset, ("language_modeling", "prompt_completion"), text_field=text_field)
        check_not_reserved(dataset, SFT_COLUMNS)
        _check_loss_options(dataset_format, completion_only_loss, assistant_only_loss)
        is_paired = dataset_format.kind == "prompt_completion"
        encoder = row_encoder(dataset_format, processing_class, chat_template_kwargs)
        row = _SFTRow(
            encoder,
            dataset_format.columns,
            max_length,
            truncation,
            completion_only=is_paired if completion_only_loss is None else completion_only_loss,
            assistant_only=assistant_only_loss,
        )
        encoder.check_end_of_text()
        dataset = with_readable_images(convert_from_value(dataset, dataset_format), encoder)
        encoder.warn_of_special_tokens(dataset, row.token_ids)
        encode_row, images = encoder.with_images(row)
    features = datasets.Features(
        input_ids=datasets.List(datasets.Value("int32")),
        trainable=datasets.List(datasets.Value("bool")),
        **images,
    )
    return map_rows(
        dataset,
        encode_row,
        features,
        invalid_rows=invalid_rows,
        num_proc=num_proc,
        desc="Tokenizing",
    )


def prepare_prompt_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    *,
    max_prompt_length: int | None,
    truncation: TruncationSide = "left",
    filter_overlong: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Mapping[str | None, Sequence[Mapping[str, Any]]] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize the column `prompt` as generation reads it.

    A column `prompt_ids`, or `input_ids` without a column `prompt`, holds prompts that are tokenized already. Without
    a column `prompt`, it is filled with their text.

    A conversational prompt ends with the header of an assistant's turn. If its last message is an assistant's, it ends
    inside that turn instead.

    Args:
        dataset: With text or messages in `prompt`, and any other columns; a stream is tokenized while it is read.
        processing_class: A tokenizer, or a processor if prompts may have images; for conversations with a chat
            template.
        max_prompt_length: Tokens of a prompt; None: no limit.
        truncation: The side of longer prompts that is cut off, or "error".
        filter_overlong: Drop longer prompts instead of truncating them: with a warning, or from a stream silently.
        chat_template_kwargs: For the template of all rows; a row's own column of that name takes precedence.
        tools: Schemas of the tools that the model may call, see `RowEncoder`; None: there are no episodes.
        num_proc: Number of processes that tokenize; None for a stream.
    Returns:
        All columns, and `prompt_ids: list[int]`. With a processor also `images`, as they are stored, and
        `unexpanded_ids: list[int]`, the prompt with one placeholder for each image; empty without images.
    Raises:
        ConfigError: `filter_overlong` without a limit, or `num_proc` for a stream.
        DataError: Rows cannot be used, or no row is left.
    """
    if filter_overlong and max_prompt_length is None:
        raise ConfigError("filter_overlong=True has no effect without max_prompt_length. Set max_prompt_length")
    check_limit(max_prompt_length)
    limits = (None if filter_overlong else max_prompt_length, truncation)
    encode_row: EncodeRow
    images: Mapping[str, Any] = {}
    if column := _prompt_ids_column(dataset):
        if tools is not None:
            raise DataError(
                f"column {column!r} holds token ids: with tools, environments or an agent, prompts are lists of "
                "messages in the column 'prompt'"
            )
        tokenizer = tokenizer_of(processing_class)
        encode_row = _TokenizedPromptRow(tokenizer, column, num_ids_of(tokenizer), *limits)
        dataset = with_lists(dataset)
    else:
        dataset_format = detect_format(dataset, ("prompt_only",))
        if tools is not None:
            _check_episodes(dataset, dataset_format)
        encoder = row_encoder(dataset_format, processing_class, chat_template_kwargs, tools)
        row = _PromptRow(encoder, dataset_format.columns[0], *limits)
        dataset = with_readable_images(convert_from_value(dataset, dataset_format), encoder)
        encoder.warn_of_special_tokens(dataset, lambda one: row.encode(one).token_ids, learns_to_stop=False)
        encode_row, images = encoder.with_images(row)
        if encoder.reader is not None:  # for servers that expand placeholders themselves
            check_not_reserved(dataset, ("unexpanded_ids",))
            images = {**images, "unexpanded_ids": datasets.List(datasets.Value("int32"))}
    names, ids = get_dataset_column_names(dataset), datasets.List(datasets.Value("int32"))
    text = {} if "prompt" in names else {"prompt": datasets.Value("string")}
    rows = map_rows(
        dataset,
        encode_row,
        {**(dataset.features or dict.fromkeys(names)), **text, **images, "prompt_ids": ids},
        invalid_rows="error",
        num_proc=num_proc,
        desc="Tokenizing prompts",
        remedy="Correct them, or drop them with dataset.filter(...)",
    )
    if not filter_overlong:
        return rows
    assert max_prompt_length is not None
    if isinstance(rows, datasets.IterableDataset):
        return rows.filter(lambda row: len(row["prompt_ids"]) <= max_prompt_length)
    problems = {
        index: f"prompt of {len(prompt_ids)} tokens, more than max_prompt_length={max_prompt_length}"
        for index, prompt_ids in enumerate(rows["prompt_ids"])
        if len(prompt_ids) > max_prompt_length
    }
    return drop_rows(rows, problems, remedy="Raise max_prompt_length, or set filter_overlong=False to truncate them")


def with_given_ids(
    dataset: datasets.Dataset,
    processing_class: ProcessingClass,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Tokenize `prompt` and `completion` together, as for supervised fine-tuning.

    Args:
        dataset: In the prompt-completion format, with any other columns.
        processing_class: See `prepare_sft_dataset`.
        chat_template_kwargs: See `prepare_sft_dataset`.
        num_proc: See `prepare_sft_dataset`.
    Returns:
        All columns, and `given_ids: list[int]` with flags `given_trainable: list[bool]`, which are True from the first
        token of the completion on, for the tokens to learn.
    Raises:
        DataError: There is no column `completion`, or a row cannot be used.
    """
    if not has_columns(dataset, ("prompt", "completion")):
        raise DataError(
            "on_policy_fraction is below 1, but train_dataset has no columns 'prompt' and 'completion', which hold "
            f"the other completions: its columns are {', '.join(get_dataset_column_names(dataset))}. Add them, or set "
            "on_policy_fraction=1."
        )
    given = prepare_sft_dataset(
        dataset,
        processing_class,
        max_length=None,
        truncation="right",
        invalid_rows="error",
        completion_only_loss=True,
        chat_template_kwargs=chat_template_kwargs,
        num_proc=num_proc,
    )
    names = {"input_ids": "given_ids", "trainable": "given_trainable"}
    check_not_reserved(dataset, tuple(names.values()))
    given = given.select_columns(list(names)).rename_columns(names)
    return datasets.concatenate_datasets([dataset, given], axis=1)


def _prompt_ids_column(dataset: AnyDataset) -> str | None:
    """The column of a dataset that holds its prompts as token ids."""
    if has_columns(dataset, ("prompt_ids",)):
        return "prompt_ids"
    is_tokenized = has_columns(dataset, ("input_ids",)) and not has_columns(dataset, ("prompt",))
    return "input_ids" if is_tokenized else None


def _check_episodes(dataset: AnyDataset, dataset_format: Format) -> None:
    if dataset_format.style != "conversational":
        raise DataError(
            "column 'prompt' holds text: with tools, environments or an agent, prompts are lists of messages, such as "
            '[{"role": "user", "content": "..."}]'
        )
    column = image_column(dataset)
    if column is not None:
        raise DataError(
            f"column {column!r} holds images, which tools and environments do not take yet. Remove the column: "
            f"dataset.remove_columns({column!r})"
        )
    if "tools" in get_dataset_column_names(dataset):
        raise DataError(
            "column 'tools': the trainer's arguments tools and environment_factory define the tools. Remove the column"
        )


def decoded_completion(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], conversational: bool, ends: Sequence[str] = ()
) -> str | list[Message]:
    """A completion as rewards see it: its text without special tokens, or one assistant message with that text.

    The text ends before the first of `ends`.
    """
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    for end in ends:
        text = text.partition(end)[0]
    return [{"role": "assistant", "content": text}] if conversational else text


def _masks(names: Sequence[str], completion_only: bool | None, assistant_only: bool) -> tuple[str, ...]:
    """The columns of a tokenized dataset that mark the tokens with a loss."""
    if "labels" in names:
        return ("labels",)
    masks = tuple(
        column
        for column, is_read in (("assistant_masks", True), ("completion_mask", completion_only is not False))
        if is_read and column in names
    )
    for option, value, column in (
        ("completion_only_loss", completion_only, "completion_mask"),
        ("assistant_only_loss", assistant_only, "assistant_masks"),
    ):
        if value and column not in names:
            raise ConfigError(
                f"{option}=True: the dataset is tokenized (it has a column 'input_ids'), and has no column {column!r} "
                f"that marks these tokens. Add it, or 'labels', or leave {option} unset"
            )
    return masks


def _check_loss_options(dataset_format: Format, completion_only: bool | None, assistant_only: bool) -> None:
    if completion_only and dataset_format.kind != "prompt_completion":
        raise ConfigError(
            f"completion_only_loss=True: the dataset has columns {list(dataset_format.columns)}, but no column "
            "'completion'. Give columns 'prompt' and 'completion', use assistant_only_loss=True for conversations, "
            "or leave it None"
        )
    if assistant_only and dataset_format.style != "conversational":
        raise ConfigError(
            f"assistant_only_loss=True: columns {list(dataset_format.columns)} hold text, not messages. "
            "Give lists of messages, or set assistant_only_loss=False"
        )
