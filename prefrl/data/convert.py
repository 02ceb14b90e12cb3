"""Turn preference data into other preference data: a common prompt, labeled rows, completions of other prompts.

Those for prompts and labels work on raw rows, before tokenization. All read streams lazily.
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

__all__ = [
    "common_prompt",
    "extract_prompt",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "unpair_preference_dataset",
    "MISMATCHED",
    "with_mismatched_completions",
]

AnyData: TypeAlias = AnyDataset | datasets.DatasetDict | datasets.IterableDatasetDict
_Splits = (datasets.DatasetDict, datasets.IterableDatasetDict)
_UNPAIRED = ("completion", "label")
_BLOCK = 1000  # pairs that are unpaired together


def extract_prompt(data: AnyData | Mapping[str, Any], num_proc: int | None = None) -> Any:
    """Make an implicit prompt explicit: move the common start of `chosen` and `rejected` into `prompt`.

    - Text: the prompt stops where the sides begin to differ, or at the start of the word in which they do. A space
      before that word goes to the completions, because tokenizers treat it as the start of the word.
    - Conversations: the prompt is the common messages, up to one that an assistant answers.

    Data that already has a prompt of the same type as the sides is returned unchanged. A text prompt beside
    conversations only repeats their start, and is replaced.

    Args:
        data: A preference dataset, its splits, or one row.
        num_proc: Number of processes for a map-style dataset.
    Returns:
        The same kind of object with columns `prompt`, `chosen`, `rejected` and all others; for a row only these three.
    Raises:
        ConfigError: `num_proc` for a stream or a row.
        DataError: Not preference data, or two sides with no common start; names the row.
    """
    if isinstance(data, _Splits):
        return type(data)({name: extract_prompt(split, num_proc) for name, split in data.items()})
    if num_proc is not None and not isinstance(data, datasets.Dataset):
        raise ConfigError(
            f"num_proc={num_proc}: only a map-style dataset can be read by several processes. Leave num_proc out"
        )
    if isinstance(data, Mapping):
        return _with_prompt(data)
    dataset_format = detect_format(data, ("preference",))
    if "prompt" in dataset_format.columns:
        return data
    data = convert_from_value(data, dataset_format)
    features = data.features and datasets.Features({**data.features, "prompt": data.features["chosen"]})
    about = {} if num_proc is None else {"num_proc": num_proc}
    return data.map(_extract_row, with_indices=True, features=features, **about)


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extract_prompt` of a preference row with an implicit prompt; any other row as it is.

    Raises:
        DataError: The two sides have no common start.
    """
    if not {"chosen", "rejected"} <= example.keys():
        return example
    has_prompt = "prompt" in example and isinstance(example["prompt"], list) == isinstance(example["chosen"], list)
    return example if has_prompt else _with_prompt(example)


def unpair_preference_dataset(dataset: AnyData, num_proc: int | None = None, **map_kwargs: Any) -> AnyData:
    """Turn each pair into two rows: the chosen completion with label True, and the rejected one with label False.

    Of each block of 1000 pairs (`batch_size`), first come all chosen completions and then all rejected ones. The order
    does not depend on the number of processes.

    Other columns are repeated for both rows, except those about the pair: `margin`, and names that contain "chosen" or
    "rejected".

    Args:
        dataset: Preference data, or its splits, with a `prompt` or with an implicit one (see `extract_prompt`).
        num_proc: Number of processes that extract the prompts of a map-style dataset.
        map_kwargs: For the `map` of the dataset, such as `batch_size` and `desc`.
    Returns:
        The columns `prompt`, `completion`, `label: bool`, and the others.
    Raises:
        ConfigError: `num_proc` for a stream.
        DataError: Not preference data, two sides with no common start and no prompt, or a column that already has one
            of the names above.
    """
    if isinstance(dataset, _Splits):
        splits = {name: unpair_preference_dataset(d, num_proc, **map_kwargs) for name, d in dataset.items()}
        return type(dataset)(splits)
    dataset = extract_prompt(dataset, num_proc)
    names = column_names(dataset)
    taken = [name for name in _UNPAIRED if name in names]
    if taken:
        raise DataError(
            f"column {taken[0]!r} would be overwritten: unpairing creates the columns 'completion' and 'label'. "
            f"Rename it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}'), or remove it"
        )
    kept = [name for name in names if name != "margin" and "chosen" not in name and "rejected" not in name]
    # One process: which rows make a batch must not depend on the number of processes.
    options = {"batch_size": _BLOCK, "features": _unpaired_features(dataset.features, kept)} | map_kwargs
    return dataset.map(_unpair_batch, batched=True, remove_columns=names, fn_kwargs={"kept": kept}, **options)


def maybe_unpair_preference_dataset(dataset: AnyData, num_proc: int | None = None, desc: str | None = None) -> AnyData:
    """`unpair_preference_dataset` of preference data; any other dataset as it is.

    Args:
        dataset: A dataset, or its splits.
        num_proc: See `unpair_preference_dataset`.
        desc: What the progress bar says; not for streams.
    """
    one = next(iter(dataset.values())) if isinstance(dataset, _Splits) else dataset
    if not {"chosen", "rejected"} <= set(column_names(one)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc, **({} if desc is None else {"desc": desc}))


def common_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """The common messages at the start of two conversations, up to one that an assistant answers.

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
                f"column {side!r}: the first message after the part that chosen and rejected share (message {stop}) "
                f"has role {role!r}: must be 'assistant'"
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
    """The number of characters of the common prompt of two texts."""
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
    """Whether a position is inside a word."""
    return all(character.isalnum() for character in text[position - 1 : position + 1])


def _no_common_start(unit: str) -> str:
    return (
        f"columns 'chosen' and 'rejected' start with no common {unit}: without a column 'prompt', the prompt is the "
        "common prefix of both. Add the column, or drop the row"
    )


def _unpair_batch(batch: Mapping[str, list[Any]], kept: Sequence[str]) -> dict[str, list[Any]]:
    chosen, rejected = batch["chosen"], batch["rejected"]
    return {
        **{name: [*batch[name], *batch[name]] for name in kept},
        "completion": [*chosen, *rejected],
        "label": [True] * len(chosen) + [False] * len(rejected),
    }


def _unpaired_features(features: datasets.Features | None, kept: Sequence[str]) -> datasets.Features | None:
    """The types of the columns of `_unpair_batch`; None: unknown, or the messages of the sides have different keys."""
    if features is None or features["chosen"] != features["rejected"]:
        return None
    types = {name: features[name] for name in kept}
    return datasets.Features({**types, "completion": features["chosen"], "label": datasets.Value("bool")})


MISMATCHED = "KL_completion_ids"

_IDS = datasets.List(datasets.Value("int32"))
_WINDOW = 1000  # rows within which a row looks for the completion of another prompt


def with_mismatched_completions(rows: AnyDataset, max_length: int | None) -> AnyDataset:
    """The prepared rows with the column `MISMATCHED`; see `prefrl.data.preference.prepare_unpaired_dataset`."""
    arguments = {"max_length": max_length, "have_images": "images" in column_names(rows)}
    options = {"batched": True, "batch_size": _WINDOW, "fn_kwargs": arguments}
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(_mismatch, **options)
    features = datasets.Features({**rows.features, MISMATCHED: _IDS})
    # One process: the windows must not depend on how the rows are split over processes.
    rows = rows.map(_mismatch, features=features, desc="Pairing with other prompts", **options)
    if not any(rows[MISMATCHED]):
        raise DataError(
            f"no two rows within {_WINDOW} have different prompts: KTO estimates its KL divergence from completions "
            "of other prompts. Shuffle the dataset, or add rows with other prompts"
        )
    return rows


def _mismatch(
    rows: Mapping[str, Sequence[list[int]]], max_length: int | None, have_images: bool
) -> dict[str, list[list[int]]]:
    prompts: Sequence[Any] = rows["prompt_ids"]
    completions = rows["completion_ids"]
    if have_images:  # prompts of the same tokens differ by their images, which need not be read for this
        prompts = [(prompt, row) for row, prompt in enumerate(prompts)]
    other: list[int | None] = [None] * len(prompts)
    for _ in range(2):  # the first round does not yet know the last rows, which the first rows follow
        for row in range(len(prompts)):
            other[row] = row - 1 if prompts[row] != prompts[row - 1] else other[row - 1]
    return {
        MISMATCHED: [
            [] if index is None else completions[index][: None if max_length is None else max_length - len(prompt)]
            for prompt, index in zip(rows["prompt_ids"], other, strict=True)
        ]
    }
