"""Tokenize preference datasets: pairs, pairs for a reward model, and single labeled completions.

All completions of a prompt see the same prompt tokens. Prompt and completion are tokenized together; tokens at the end
of the prompt that depend on what follows belong to the completion.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from prefrl.data.chat import EncodedText, common_prefix_length, join_prompt
from prefrl.data.checks import num_ids_of, read_ids, with_lists
from prefrl.data.encode import (
    EncodedPair,
    RowEncoder,
    TruncationSide,
    check_limit,
    row_encoder,
    with_readable_images,
)
from prefrl.data.formats import (
    AnyDataset,
    check_answered,
    check_not_reserved,
    convert_from_value,
    detect_format,
    get_dataset_column_names,
    has_columns,
    read_text,
)
from prefrl.data.images import ProcessingClass, tokenizer_of
from prefrl.data.packing import REMEDY, EncodeRow, InvalidRows, map_rows
from prefrl.data.sources import (
    MISMATCHED,
    common_prompt,
    extract_prompt,
    unpair_preference_dataset,
    with_mismatched_completions,
)
from prefrl.distributed import is_main
from prefrl.errors import DataError

logger = logging.getLogger(__name__)

_IDS = datasets.List(datasets.Value("int32"))
_PREFERENCE = datasets.Features(prompt_ids=_IDS, chosen_ids=_IDS, rejected_ids=_IDS)
_REWARD = datasets.Features(chosen_ids=_IDS, rejected_ids=_IDS)
_OLD_REWARD = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}  # names of TRL before 1.0
_UNPAIRED = datasets.Features(prompt_ids=_IDS, completion_ids=_IDS, label=datasets.Value("bool"))


def prepare_preference_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    *,
    max_length: int | None,
    truncation: TruncationSide,
    invalid_rows: InvalidRows,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize pairs of a chosen and a rejected completion of one prompt.

    EOS is appended to plain text unless it already ends with it; conversations end with the token that ends the last
    turn. An implicit prompt is the common start of both sides: tokens of a text, or messages of a conversation, up to
    one that an assistant answers.

    A dataset with the columns that this function returns is tokenized already, and only truncated.

    Args:
        dataset: Preference format; a stream is tokenized while it is read.
        processing_class: A tokenizer, or a processor if prompts may have images; with an EOS token, and for
            conversations with a chat template.
        max_length: Tokens of prompt and completion; None: no limit.
        truncation: "right" cuts off the ends of completions, "left" the start of the prompt so that the longer side
            fits; with "error", longer rows cannot be used.
        invalid_rows: What happens to rows that cannot be used, see `prefrl.data.packing.map_rows`.
        chat_template_kwargs: For the template of all rows; a row's own column of that name takes precedence.
        num_proc: Number of processes that tokenize; None for a stream.
    Returns:
        Columns `prompt_ids`, `chosen_ids` and `rejected_ids`: lists of ids, none empty.
    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A row cannot be used, or no row is left.
    """
    check_limit(max_length)
    encode_row: EncodeRow
    images: Mapping[str, Any] = {}
    if has_columns(dataset, tuple(_PREFERENCE)):
        encode_row = _TokenizedPreferenceRow(num_ids_of(tokenizer_of(processing_class)), max_length, truncation)
        dataset = with_lists(dataset)
    else:
        dataset_format = detect_format(dataset, ("preference",))
        check_not_reserved(dataset, tuple(_PREFERENCE))
        dataset = convert_from_value(dataset, dataset_format)
        encoder = row_encoder(dataset_format, processing_class, chat_template_kwargs)
        pair = _PreferenceRow(encoder, "prompt" in dataset_format.columns, max_length, truncation)
        encoder.check_end_of_text()
        dataset = with_readable_images(dataset, encoder)
        encoder.warn_of_special_tokens(dataset, pair.chosen_ids)
        encode_row, images = encoder.with_images(pair)
    return map_rows(
        dataset,
        encode_row,
        {**_PREFERENCE, **images},
        invalid_rows=invalid_rows,
        num_proc=num_proc,
        desc="Tokenizing pairs",
    )


def prepare_reward_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    *,
    max_length: int | None,
    invalid_rows: InvalidRows,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize pairs of whole sequences, prompt and completion, as a reward model scores them.

    Nothing is truncated: a row with a sequence longer than `max_length` cannot be used. A dataset with the columns
    `chosen_ids` and `rejected_ids`, or `chosen_input_ids` and `rejected_input_ids`, is tokenized already.

    Args:
        dataset: Preference format, with or without a column `margin`: by how much the chosen side is better.
        processing_class: As in `prepare_preference_dataset`.
        max_length: Tokens of a sequence; None: no limit.
        invalid_rows: As in `prepare_preference_dataset`.
        chat_template_kwargs: As in `prepare_preference_dataset`.
        num_proc: As in `prepare_preference_dataset`.
    Returns:
        Columns `chosen_ids` and `rejected_ids`: lists of ids; and `margin: float` if the dataset has it.
    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A row cannot be used, or no row is left.
    """
    check_limit(max_length)
    has_margin = "margin" in get_dataset_column_names(dataset)
    encode_row: EncodeRow
    images: Mapping[str, Any] = {}
    if has_columns(dataset, tuple(_OLD_REWARD)) and not has_columns(dataset, tuple(_REWARD)):
        dataset = dataset.rename_columns(_OLD_REWARD)
    if has_columns(dataset, tuple(_REWARD)):
        encode_row = _TokenizedRewardRow(num_ids_of(tokenizer_of(processing_class)), max_length, has_margin)
        dataset = with_lists(dataset)
    else:
        dataset_format = detect_format(dataset, ("preference",))
        check_not_reserved(dataset, tuple(_REWARD))
        dataset = convert_from_value(dataset, dataset_format)
        encoder = row_encoder(dataset_format, processing_class, chat_template_kwargs)
        encoder.check_end_of_text()
        pair = _RewardRow(encoder, "prompt" in dataset_format.columns, max_length, has_margin)
        dataset = with_readable_images(dataset, encoder)
        encoder.warn_of_special_tokens(dataset, pair.chosen_ids, learns_to_stop=False)
        encode_row, images = encoder.with_images(pair)
    margin = {"margin": datasets.Value("float64")} if has_margin else {}
    return map_rows(
        dataset,
        encode_row,
        {**_REWARD, **margin, **images},
        invalid_rows=invalid_rows,
        num_proc=num_proc,
        desc="Tokenizing pairs",
    )


def prepare_unpaired_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    *,
    max_length: int | None,
    truncation: TruncationSide,
    invalid_rows: InvalidRows,
    with_mismatched: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Tokenize completions that are individually labeled desirable or undesirable.

    A dataset with the columns `prompt_ids`, `completion_ids` and `label` is tokenized already, and only truncated.

    Args:
        dataset: Unpaired format; or preference format, whose rows each become a desirable and an undesirable row.
        processing_class: As in `prepare_preference_dataset`.
        max_length: As in `prepare_preference_dataset`.
        truncation: As in `prepare_preference_dataset`.
        invalid_rows: As in `prepare_preference_dataset`.
        with_mismatched: Add to each row the completion of another prompt, from which KTO estimates its KL divergence:
            that of the nearest earlier row with a different prompt, within windows of 1000 rows that wrap around.
        chat_template_kwargs: As in `prepare_preference_dataset`.
        num_proc: As in `prepare_preference_dataset`.
    Returns:
        Columns `prompt_ids` and `completion_ids`: lists of ids, none empty; `label: bool`; and, with
        `with_mismatched`, `KL_completion_ids`: as many ids as fit after the prompt, none if there is no other prompt.
    Raises:
        ConfigError: An option does not fit the dataset.
        DataError: A row cannot be used, no row is left, or none of a map-style dataset has a mismatched completion.
    """
    check_limit(max_length)
    remedy = REMEDY
    encode_row: EncodeRow
    images: Mapping[str, Any] = {}
    if has_columns(dataset, tuple(_UNPAIRED)):
        check_not_reserved(dataset, (MISMATCHED,))
        encode_row = _TokenizedUnpairedRow(num_ids_of(tokenizer_of(processing_class)), max_length, truncation)
        dataset = with_lists(dataset)
    else:
        dataset_format = detect_format(dataset, ("unpaired", "preference"))
        if dataset_format.kind == "preference":
            dataset = _unpaired(convert_from_value(dataset, dataset_format), invalid_rows, num_proc)
            dataset_format = detect_format(dataset, ("unpaired",))
            remedy += ". Rows are numbered as in unpair_preference_dataset(dataset, batch_size=2)"
        check_not_reserved(dataset, ("prompt_ids", "completion_ids", MISMATCHED))
        dataset = convert_from_value(dataset, dataset_format)
        encoder = row_encoder(dataset_format, processing_class, chat_template_kwargs)
        encoder.check_end_of_text()
        completion = _UnpairedRow(encoder, max_length, truncation)
        dataset = with_readable_images(dataset, encoder)
        encoder.warn_of_special_tokens(dataset, completion.token_ids)
        encode_row, images = encoder.with_images(completion)
    rows = map_rows(
        dataset,
        encode_row,
        {**_UNPAIRED, **images},
        invalid_rows=invalid_rows,
        num_proc=num_proc,
        desc="Tokenizing completions",
        remedy=remedy,
    )
    if isinstance(rows, datasets.Dataset):
        _warn_of_one_label(rows["label"][:])
    return with_mismatched_completions(rows, max_length) if with_mismatched else rows


@dataclass(frozen=True)
class _PreferenceRow:
    """The common prompt of a row and its two completions."""

    encoder: RowEncoder
    has_prompt: bool
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        chosen, rejected = self._sides(row)
        start = min(common_prefix_length(chosen.token_ids, rejected.token_ids), chosen.start, rejected.start)
        _check_images(chosen, rejected, start)
        prompt, *completions = _fit(
            chosen.token_ids[:start],
            [chosen.token_ids[start:], rejected.token_ids[start:]],
            self.max_length,
            self.truncation,
            has_images=chosen.image_stop > 0,
        )
        _check_different(*completions)
        return {"prompt_ids": prompt, "chosen_ids": completions[0], "rejected_ids": completions[1]}

    def chosen_ids(self, row: Mapping[str, Any]) -> list[int]:
        """Prompt and chosen completion without truncation."""
        return self._sides(row)[0].token_ids

    def _sides(self, row: Mapping[str, Any]) -> tuple[EncodedPair, EncodedPair]:
        if self.encoder.is_conversational:
            return self._conversations(row)
        chosen, rejected = (read_text(row, column) for column in ("chosen", "rejected"))
        if self.has_prompt:
            prompt = read_text(row, "prompt")
            return self.encoder.text_pair(prompt, chosen), self.encoder.text_pair(prompt, rejected)
        sides = [self.encoder.document(text).token_ids for text in (chosen, rejected)]
        start = common_prefix_length(*sides)
        if start <= len(self.encoder.prefix(chosen)):
            raise DataError(
                "columns 'chosen' and 'rejected' start with different tokens: without a column 'prompt', their common "
                "prefix is the prompt. Add a column 'prompt'"
            )
        return EncodedPair(sides[0], start), EncodedPair(sides[1], start)

    def _conversations(self, row: Mapping[str, Any]) -> tuple[EncodedPair, EncodedPair]:
        template = self.encoder.template(row)
        chosen, rejected = (self.encoder.messages(row, column) for column in ("chosen", "rejected"))
        if self.has_prompt:
            prompt = self.encoder.messages(row, "prompt")
            chosen, rejected = join_prompt(prompt, chosen), join_prompt(prompt, rejected)
        else:
            prompt = common_prompt(chosen, rejected)
        return self.encoder.chat_pair(template, prompt, chosen), self.encoder.chat_pair(template, prompt, rejected)


@dataclass(frozen=True)
class _RewardRow:
    """The whole sequences of a row's two sides."""

    encoder: RowEncoder
    has_prompt: bool
    max_length: int | None
    has_margin: bool

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        chosen, rejected = (self._sequence(row, side) for side in ("chosen", "rejected"))
        sides = [chosen.token_ids, rejected.token_ids]
        _check_images(chosen, rejected, common_prefix_length(*sides))
        return _whole_sides(sides, self.max_length) | _margin_column(row, self.has_margin)

    def chosen_ids(self, row: Mapping[str, Any]) -> list[int]:
        """The chosen sequence."""
        return self._sequence(row, "chosen").token_ids

    def _sequence(self, row: Mapping[str, Any], side: str) -> EncodedText:
        if not self.encoder.is_conversational:
            prompt = read_text(row, "prompt") if self.has_prompt else ""
            return self.encoder.document(prompt + read_text(row, side))
        messages = self.encoder.messages(row, side)
        if self.has_prompt:
            messages = join_prompt(self.encoder.messages(row, "prompt"), messages)
        check_answered(messages, side)
        template = self.encoder.template(row)
        return template.encode(template.render(messages), [])


@dataclass(frozen=True)
class _TokenizedPreferenceRow:
    """The ids that a row holds, cut to the limit."""

    num_ids: int
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        prompt, *completions = (read_ids(row, column, self.num_ids) for column in _PREFERENCE)
        prompt, *completions = _fit(prompt, completions, self.max_length, self.truncation, has_images=False)
        _check_different(*completions)
        return dict(zip(_PREFERENCE, (prompt, *completions), strict=True))


@dataclass(frozen=True)
class _TokenizedRewardRow:
    """The ids of the two whole sequences that a row holds."""

    num_ids: int
    max_length: int | None
    has_margin: bool

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        sides = [read_ids(row, column, self.num_ids) for column in _REWARD]
        return _whole_sides(sides, self.max_length) | _margin_column(row, self.has_margin)


@dataclass(frozen=True)
class _TokenizedUnpairedRow:
    """The ids and the label that a row holds, cut to the limit."""

    num_ids: int
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        prompt, completion = (read_ids(row, column, self.num_ids) for column in ("prompt_ids", "completion_ids"))
        prompt, completion = _fit(prompt, [completion], self.max_length, self.truncation, has_images=False)
        return {"prompt_ids": prompt, "completion_ids": completion, "label": _read_label(row)}


@dataclass(frozen=True)
class _UnpairedRow:
    """Prompt, completion and label of a row."""

    encoder: RowEncoder
    max_length: int | None
    truncation: TruncationSide

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        label = _read_label(row)
        pair = self._pair(row)
        prompt, completion = _fit(
            pair.token_ids[: pair.start],
            [pair.token_ids[pair.start :]],
            self.max_length,
            self.truncation,
            has_images=pair.image_stop > 0,
        )
        return {"prompt_ids": prompt, "completion_ids": completion, "label": label}

    def token_ids(self, row: Mapping[str, Any]) -> list[int]:
        """Prompt and completion without truncation."""
        return self._pair(row).token_ids

    def _pair(self, row: Mapping[str, Any]) -> EncodedPair:
        if not self.encoder.is_conversational:
            return self.encoder.text_pair(read_text(row, "prompt"), read_text(row, "completion"))
        prompt, completion = (self.encoder.messages(row, column) for column in ("prompt", "completion"))
        return self.encoder.chat_pair(self.encoder.template(row), prompt, join_prompt(prompt, completion))


def _unpaired(dataset: AnyDataset, invalid_rows: InvalidRows, num_proc: int | None) -> AnyDataset:
    """Turn each usable pair into two labeled rows."""
    features = dataset.features or dict.fromkeys(get_dataset_column_names(dataset))
    pairs = map_rows(
        dataset,
        extract_prompt,
        {**features, "prompt": features["chosen"]},
        invalid_rows=invalid_rows,
        num_proc=num_proc,
        desc="Reading pairs",
    )
    # Two pairs at a time: even unshuffled, neighbors answer different prompts, and any four rows have both labels.
    return unpair_preference_dataset(pairs, batch_size=2)


def _fit(
    prompt: list[int],
    completions: Sequence[list[int]],
    max_length: int | None,
    truncation: TruncationSide,
    *,
    has_images: bool,
) -> list[list[int]]:
    """Cut the prompt and the completions so that the prompt and any one completion are within the limit."""
    if not prompt:
        raise DataError("the prompt has no tokens of its own: even its first token depends on the completion")
    if not all(completions):
        raise DataError("one completion has no token of its own: the other completion starts with all of it")
    longest = max(map(len, completions))
    length = len(prompt) + longest
    if max_length is None or length <= max_length:
        return [prompt, *completions]
    if truncation == "error":
        raise DataError(f"has {length} tokens, more than the {max_length} allowed, and truncation='error'")
    room = max_length - (longest if truncation == "left" else len(prompt))
    if room < 1:
        kept, cut = ("completion", "prompt") if truncation == "left" else ("prompt", "completion")
        raise DataError(
            f"the {kept} has {max_length - room} tokens, which leaves none for the {cut} within "
            f"max_length={max_length}"
        )
    if truncation == "left" and has_images:
        raise DataError(
            f"has {length} tokens, more than the {max_length} allowed, and a prompt with images, which is never "
            "truncated. Raise max_length, make the images smaller in the processor, or truncate completions instead"
        )
    if truncation == "left":
        return [prompt[-room:], *completions]
    return [prompt, *(completion[:room] for completion in completions)]


def _check_images(chosen: EncodedPair | EncodedText, rejected: EncodedPair | EncodedText, num_shared: int) -> None:
    if max(chosen.image_stop, rejected.image_stop) > num_shared:
        raise DataError(
            "columns 'chosen' and 'rejected' differ before the end of their last image, but share the images, which "
            "must be in the common prefix of both sides. Move them there, or drop the row"
        )


def _check_different(chosen: list[int], rejected: list[int]) -> None:
    if chosen == rejected:
        raise DataError(f"chosen and rejected have the same {len(chosen)} tokens, so neither can be preferred")


def _whole_sides(sides: Sequence[list[int]], max_length: int | None) -> dict[str, Any]:
    """The columns of the two sequences of a row for a reward model."""
    longest = max(map(len, sides))
    if max_length is not None and longest > max_length:
        raise DataError(f"has {longest} tokens, more than max_length={max_length}")
    _check_different(*sides)
    return dict(zip(_REWARD, sides, strict=True))


def _read_label(row: Mapping[str, Any]) -> bool:
    label = row.get("label")
    if not isinstance(label, int) or label not in (0, 1):
        raise DataError(f"column 'label' is {label!r}: needs True or False, or 1 or 0")
    return bool(label)


def _margin_column(row: Mapping[str, Any], has_margin: bool) -> dict[str, Any]:
    if not has_margin:
        return {}
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"column 'margin' is {margin!r}: needs a finite number")
    return {"margin": float(margin)}


def _warn_of_one_label(labels: Sequence[bool]) -> None:
    desirable = sum(labels)
    if desirable in (0, len(labels)) and is_main():
        logger.warning(
            "column 'label': %d desirable and %d undesirable rows. A loss on unpaired data needs both: add rows of "
            "the missing label",
            desirable,
            len(labels) - desirable,
        )
