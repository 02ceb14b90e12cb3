"""Preference data in other forms: the common start of two sides as a prompt, and each side as a labelled completion.

Both work on rows as they are published, before tokenisation, and read streams lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import datasets

from prefrl.data.chat import common_length
from prefrl.data.formats import (
    AnyDataset,
    Message,
    column_names,
    convert_from_value,
    detect_format,
    read_messages,
    read_text,
)
from prefrl.errors import ConfigError, DataError

__all__ = ["common_prompt", "extract_prompt", "unpair_preference_dataset"]

AnyData: TypeAlias = AnyDataset | datasets.DatasetDict | datasets.IterableDatasetDict
_Splits = (datasets.DatasetDict, datasets.IterableDatasetDict)
_UNPAIRED = ("completion", "label")


def extract_prompt(data: AnyData | Mapping[str, Any], num_proc: int | None = None) -> Any:
    """Take the prompt out of `chosen` and `rejected` where it is only what both start with.

    - Text: the prompt stops where the sides begin to differ, or at the start of the word in which they do. A space
      before that goes to the completions, because tokenizers take it for the start of a word.
    - Conversations: the messages that both sides start with, up to one that an assistant answers.

    What has a prompt already, of the same type as the sides, is returned as it is. A prompt in text beside
    conversations repeats what they say, and is replaced.

    Args:
        data: A preference dataset, its splits, or one row.
        num_proc: Processes that read a map-style dataset.
    Returns:
        The same kind of thing with columns `prompt`, `chosen`, `rejected`, and all others; of a row these three.
    Raises:
        ConfigError: `num_proc` for a stream or a row.
        DataError: Not preference data, or two sides with no common start; names the row.
    """
    if isinstance(data, _Splits):
        return type(data)({name: extract_prompt(split, num_proc) for name, split in data.items()})
    if num_proc is not None and not isinstance(data, datasets.Dataset):
        raise ConfigError(f"num_proc={num_proc}: only a map-style dataset is read in several processes. Leave it out")
    if isinstance(data, Mapping):
        return _with_prompt(data)
    dataset_format = detect_format(data, ("preference",))
    if "prompt" in dataset_format.columns:
        return data
    data = convert_from_value(data, dataset_format)
    features = data.features and datasets.Features({**data.features, "prompt": data.features["chosen"]})
    about = {} if num_proc is None else {"num_proc": num_proc}
    return data.map(_extract_row, with_indices=True, features=features, **about)


def unpair_preference_dataset(dataset: AnyData, num_proc: int | None = None) -> AnyData:
    """Make of each pair two rows: the chosen completion with label True, and the rejected one with label False.

    Neighbours answer different prompts and labels alternate: KTO can take a neighbour's completion as one that does
    not fit a prompt, and micro-batches have both labels, without shuffling too. For that, of each 1000 pairs first one
    side comes, of even ones the chosen and of odd ones the rejected, and then the other. The order is the same for any
    number of processes.

    Other columns are repeated for both rows, except those about the pair: `margin`, and names with "chosen" or
    "rejected".

    Args:
        dataset: Preference data, or its splits, with `prompt` or what `extract_prompt` makes one of.
        num_proc: Processes that make prompts of a map-style dataset without any.
    Returns:
        Columns `prompt`, `completion`, `label: bool`, and others.
    Raises:
        ConfigError: `num_proc` for a stream.
        DataError: Not preference data, two sides with no common start and no prompt, or a column has one of the names
            above already.
    """
    if isinstance(dataset, _Splits):
        return type(dataset)({name: unpair_preference_dataset(d, num_proc) for name, d in dataset.items()})
    dataset = extract_prompt(dataset, num_proc)
    names = column_names(dataset)
    taken = [name for name in _UNPAIRED if name in names]
    if taken:
        raise DataError(
            f"column {taken[0]!r} would be written over: unpairing makes columns 'completion' and 'label'. "
            f"Rename it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}'), or remove it"
        )
    kept = [name for name in names if name != "margin" and "chosen" not in name and "rejected" not in name]
    # One process: which rows make a batch must not depend on the number of processes.
    return dataset.map(
        _unpair_batch,
        batched=True,
        batch_size=1000,
        remove_columns=names,
        features=_unpaired_features(dataset.features, kept),
        fn_kwargs={"kept": kept},
    )


def common_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """The messages that two conversations start with, up to one that an assistant answers.

    Raises:
        DataError: There is none, or a side does not go on with an assistant's message.
    """
    stop = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while stop and chosen[stop - 1]["role"] == "assistant":
        stop -= 1
    if stop == 0:
        raise DataError(_no_common_start("message"))
    for side, conversation in (("chosen", chosen), ("rejected", rejected)):
        role = conversation[stop]["role"]
        if role != "assistant":
            raise DataError(
                f"column {side!r}: the first message after the common start (message {stop}) has role {role!r}: needs "
                "'assistant'"
            )
    return list(chosen[:stop])


def _extract_row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return _with_prompt({name: row[name] for name in ("chosen", "rejected")})
    except DataError as error:
        raise DataError(f"row {index}: {error}") from error


def _with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    is_conversational = isinstance(row.get("chosen"), list)
    read: Callable[[Mapping[str, Any], str], Any] = read_messages if is_conversational else read_text
    chosen, rejected = read(row, "chosen"), read(row, "rejected")
    if "prompt" in row and isinstance(row["prompt"], list) == is_conversational:
        return {"prompt": read(row, "prompt"), "chosen": chosen, "rejected": rejected}
    stop = len(common_prompt(chosen, rejected)) if is_conversational else _prompt_length(chosen, rejected)
    return {"prompt": chosen[:stop], "chosen": chosen[stop:], "rejected": rejected[stop:]}


def _prompt_length(chosen: str, rejected: str) -> int:
    """Characters of the prompt that two texts start with."""
    differ = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    stop = differ
    while stop and any(_is_inside_word(side, stop) for side in (chosen, rejected)):
        stop -= 1
    if not chosen[:stop].strip():  # the first word differs, or a language that writes no spaces
        stop = differ
    if chosen[:stop].endswith(" "):
        stop -= 1
    if not chosen[:stop].strip():
        raise DataError(_no_common_start("text"))
    return stop


def _is_inside_word(text: str, position: int) -> bool:
    """Whether a word goes on across a position."""
    return all(character.isalnum() for character in text[position - 1 : position + 1])


def _no_common_start(unit: str) -> str:
    return (
        f"columns 'chosen' and 'rejected' start with no common {unit}: without a column 'prompt', the prompt is what "
        "both start with. Add the column, or drop the row"
    )


def _unpair_batch(batch: Mapping[str, list[Any]], kept: Sequence[str]) -> dict[str, list[Any]]:
    pairs = range(len(batch["chosen"]))
    labelled = [(k, k % 2 == 0) for k in pairs] + [(k, k % 2 == 1) for k in pairs]
    sides = {True: batch["chosen"], False: batch["rejected"]}
    return {
        **{name: [batch[name][k] for k, _ in labelled] for name in kept},
        "completion": [sides[label][k] for k, label in labelled],
        "label": [label for _, label in labelled],
    }


def _unpaired_features(features: datasets.Features | None, kept: Sequence[str]) -> datasets.Features | None:
    """The types of what `_unpair_batch` returns; None: not known, or the sides' messages have different keys."""
    if features is None or features["chosen"] != features["rejected"]:
        return None
    types = {name: features[name] for name in kept}
    return datasets.Features({**types, "completion": features["chosen"], "label": datasets.Value("bool")})
