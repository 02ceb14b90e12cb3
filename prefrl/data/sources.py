"""From the datasets that one has to the one that a trainer reads: its columns, mixtures, other preference data.

Preference data becomes other preference data: with a common prompt, labeled rows, completions of other prompts. What
does that for prompts and labels works on raw rows, before tokenization. All read streams lazily.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import datasets

from prefrl.data.chat import common_prefix_length
from prefrl.data.formats import (
    AnyDataset,
    Message,
    convert_from_value,
    convert_message,
    detect_format,
    get_dataset_column_names,
    read_messages,
    read_text,
)
from prefrl.errors import ConfigError, DataError
from prefrl.options.names import nearest

_PROMPT = "prompt"
_SAID = ("completion", "chosen", "rejected")  # by the assistant
_CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True)
class RowShape:
    """What to make of a dataset's columns.

    Args:
        renamed: New names of columns and their names in the dataset. A new name takes the place of a column that has
            it.
        kept: The columns to keep, by their new names; None: all.
        prompt_template: Text of the column `prompt`, with names of columns in braces, old or new.
        system_prompt: First message of each conversation that does not begin with a system message.
        conversational: Texts of prompt, completion, chosen and rejected become messages of the user and the
            assistant. So they do with `system_prompt`, and where `prompt_template` meets answers that are messages.
    """

    renamed: Mapping[str, str]
    kept: Sequence[str] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    conversational: bool = False

    def apply(self, dataset: AnyDataset, *, within: str = "") -> AnyDataset:
        """The dataset with the new columns.

        Args:
            dataset: A dataset or a stream.
            within: What precedes the names of options in messages, such as "datasets[1].".

        Raises:
            DataError: A column is missing, or a value cannot become text or messages.
        """
        names, makes_prompt = get_dataset_column_names(dataset), self.prompt_template is not None
        for new, old in self.renamed.items():
            if not (makes_prompt and new == old == _PROMPT):
                _check_known(f"{within}columns", old, names)
        fields = self._fields(names, within)
        dataset = _renamed(dataset, self.renamed, names)
        if makes_prompt:
            dataset = dataset.map(
                _fill_prompt, with_indices=True, fn_kwargs={"template": self.prompt_template, "fields": fields}
            )
        dataset = self._as_messages(dataset, within)
        if self.kept is None:
            return dataset
        return dataset.select_columns(list(dict.fromkeys([*self.kept, *([_PROMPT] if makes_prompt else [])])))

    def _fields(self, names: Sequence[str], within: str) -> dict[str, str]:
        """The names in the template, and the columns that they mean after renaming."""
        if self.prompt_template is None:
            return {}
        new_names = {old: new for new, old in self.renamed.items()}
        after = {new_names.get(name, name) for name in names}
        fields = {str(field) for _, field, _, _ in string.Formatter().parse(self.prompt_template) if field is not None}
        for field in sorted(fields):
            where = f"{within}prompt_template={self.prompt_template!r}"
            _check_known(where, field, sorted(after | {*names}))
        return {field: field if field in after else new_names[field] for field in fields}

    def _as_messages(self, dataset: AnyDataset, within: str) -> AnyDataset:
        first: Mapping[str, Any] = next(iter(dataset), {})
        answers_chat = self.prompt_template is not None and any(isinstance(first.get(name), list) for name in _SAID)
        if not (self.conversational or self.system_prompt is not None or answers_chat):
            return dataset
        starts = _starts(first, has_template=self.prompt_template is not None)
        if first and not starts:
            asked = "conversational=True" if self.system_prompt is None else f"system_prompt={self.system_prompt!r}"
            raise DataError(
                f"{within}{asked}: a conversation begins in the column prompt or messages, but the columns are "
                f"{list(first)}. Set columns or prompt_template."
            )
        about = {"starts": starts, "system_prompt": self.system_prompt}
        return dataset.map(_converse, fn_kwargs=about)


def _starts(row: Mapping[str, Any], *, has_template: bool) -> list[str]:
    """The columns in which conversations begin."""
    sides = [name for name in _SAID if isinstance(row.get(name), list)]
    repeats = "chosen" in sides and isinstance(row.get(_PROMPT), str) and not has_template
    found = [name for name in (_PROMPT, *_CONVERSATIONS) if name in row]
    return found[:1] if found and not repeats else sides  # a text beside whole conversations is not read


def _check_known(where: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise DataError(f"{where}: the dataset has no column {name!r}. {nearest(name, names)}")


def _renamed(dataset: AnyDataset, renamed: Mapping[str, str], names: Sequence[str]) -> AnyDataset:
    changed = {old: new for new, old in renamed.items() if old != new}
    replaced = [new for new in changed.values() if new in names and new not in changed]
    dataset = dataset.remove_columns(replaced) if replaced else dataset
    if not changed.keys() & changed.values():
        return dataset.rename_columns(changed) if changed else dataset
    # Streams cannot exchange two names at once.
    between = {old: f"{new} (renamed)" for old, new in changed.items()}
    return dataset.rename_columns(between).rename_columns({between[old]: new for old, new in changed.items()})


def _fill_prompt(row: Mapping[str, Any], index: int, template: str, fields: Mapping[str, str]) -> dict[str, Any]:
    values = {field: row.get(column) for field, column in fields.items()}
    for field, value in values.items():
        if not isinstance(value, str | int | float | None):
            raise DataError(
                f"row {index}, column {field!r} is a {type(value).__name__}: prompt_template={template!r} accepts "
                "only texts and numbers"
            )
    # A row without a value is no prompt. The trainer says so, or drops it.
    return {_PROMPT: None if None in values.values() else template.format(**values)}


def _converse(row: Mapping[str, Any], starts: Sequence[str], system_prompt: str | None) -> dict[str, Any]:
    said = {name: _messages(row[name], "assistant") for name in _SAID if name in row}
    begun = {name: said[name] if name in said else _messages(row[name], "user") for name in starts}
    if system_prompt is not None:
        begun = {name: _with_system(messages, system_prompt) for name, messages in begun.items()}
    return said | begun


def _messages(value: Any, role: str) -> Any:
    """A text as a message; messages and anything else as they are."""
    if isinstance(value, list):
        return [convert_message(message) for message in value]
    return [{"role": role, "content": value}] if isinstance(value, str) and value else value


def _with_system(messages: Any, text: str) -> Any:
    system: Message = {"role": "system", "content": text}
    has_one = not isinstance(messages, list) or not messages or messages[0].get("role") in ("system", "developer")
    return messages if has_one else [system, *messages]


Stopping = Literal["first_exhausted", "all_exhausted"]


def mix_datasets(
    parts: Mapping[str, AnyDataset], *, weights: Mapping[str, float] | None, seed: int, stopping: Stopping
) -> AnyDataset:
    """Draw each row at random from one of several datasets, or concatenate the datasets.

    The rows of each dataset keep their order. A mixture of streams is the same in each epoch, unless it is shuffled.

    Args:
        parts: Datasets by name, all map-style or all streams, with the same columns.
        weights: Probabilities of the datasets, up to a common factor. Without weights, the datasets are concatenated,
            and `seed` and `stopping` are not used.
        seed: Seed for the draws.
        stopping: "first_exhausted": stop when one dataset has no more rows, so that no row is seen twice.
            "all_exhausted": stop when all rows have been seen, and restart datasets that end earlier.
    Raises:
        ConfigError: There are no datasets, or the weights are not one positive number for each dataset.
        DataError: A dataset is empty, or differs from the first in its kind or its columns.
    """
    if not parts:
        raise ConfigError("a mixture of 0 datasets: give at least one")
    _check_alike(parts)
    if weights is None:
        return datasets.concatenate_datasets(list(parts.values()))
    _check_weights(parts, weights)
    total = sum(weights.values())
    return datasets.interleave_datasets(
        list(parts.values()),
        probabilities=[weights[name] / total for name in parts],
        seed=seed,
        stopping_strategy=stopping,
    )


def _check_weights(parts: Mapping[str, AnyDataset], weights: Mapping[str, float]) -> None:
    if weights.keys() != parts.keys():
        raise ConfigError(
            f"weights for {sorted(weights)}, but the datasets are {sorted(parts)}: give each dataset one weight"
        )
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"weight of dataset {name!r} is {weight}: needs a positive number. Leave it out to drop it"
            )


def _check_alike(parts: Mapping[str, AnyDataset]) -> None:
    first, *others = parts
    for name, part in parts.items():
        if not isinstance(part, AnyDataset):
            raise DataError(
                f"dataset {name!r} is a {type(part).__name__}: needs a datasets.Dataset or IterableDataset"
            )
        if next(iter(part), None) is None:
            raise DataError(f"dataset {name!r} has 0 rows: leave it out, or check its split and filters")
    for name in others:
        _check_same_columns(first, parts[first], name, parts[name])


def _check_same_columns(first: str, expected: AnyDataset, name: str, found: AnyDataset) -> None:
    if type(found) is not type(expected):
        raise DataError(
            f"dataset {first!r} is a {type(expected).__name__}, but {name!r} is a {type(found).__name__}: load all "
            "of them with streaming=True, or none"
        )
    expected_names, found_names = get_dataset_column_names(expected), get_dataset_column_names(found)
    missing = [column for column in expected_names if column not in found_names]
    extra = [column for column in found_names if column not in expected_names]
    if missing or extra:
        raise DataError(
            f"dataset {name!r} does not have the columns of {first!r}: {missing} missing, {extra} extra. Make them "
            "equal with select_columns and rename_column; in a YAML file, with columns: [answer, {prompt: question}]"
        )
    if expected.features is None or found.features is None:
        return
    for column in expected_names:
        if expected.features[column] != found.features[column]:
            raise DataError(
                f"column {column!r} of dataset {name!r} has type {found.features[column]}, but in {first!r} it has "
                f"type {expected.features[column]}. Use cast_column to make the types equal"
            )


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
    """Apply `extract_prompt` to a preference row with an implicit prompt, and return any other row unchanged.

    Raises:
        DataError: The two sides have no common start.
    """
    if not {"chosen", "rejected"} <= example.keys():
        return example
    has_prompt = "prompt" in example and isinstance(example["prompt"], list) == isinstance(example["chosen"], list)
    return example if has_prompt else _with_prompt(example)


def unpair_preference_dataset(dataset: AnyData, num_proc: int | None = None, **map_kwargs: Any) -> AnyData:
    """Turn each pair into two rows: the chosen completion with label True, and the rejected one with label False.

    In each block of 1000 pairs (`batch_size`), all chosen completions come first, and then all rejected ones. The
    order does not depend on the number of processes.

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
    names = get_dataset_column_names(dataset)
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
    """Apply `unpair_preference_dataset` to preference data, and return any other dataset unchanged.

    Args:
        dataset: A dataset, or its splits.
        num_proc: See `unpair_preference_dataset`.
        desc: Description of the progress bar. Streams have none.
    """
    one = next(iter(dataset.values())) if isinstance(dataset, _Splits) else dataset
    if not {"chosen", "rejected"} <= set(get_dataset_column_names(one)):
        return dataset
    return unpair_preference_dataset(dataset, num_proc, **({} if desc is None else {"desc": desc}))


def common_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """The common messages at the start of two conversations, up to one that an assistant answers.

    Raises:
        DataError: There is none, or a side does not go on with an assistant's message.
    """
    stop = min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
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
    differ = min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
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
    arguments = {"max_length": max_length, "have_images": "images" in get_dataset_column_names(rows)}
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


def split_off(dataset: datasets.Dataset, size: float, *, seed: int) -> datasets.DatasetDict:
    """Draw rows to evaluate on: the split "test"; "train" has the others.

    Args:
        dataset: The rows.
        size: The option `test_split_size`.
        seed: All processes draw the same rows with it.

    Raises:
        ConfigError: One of the splits would have no rows.
    """
    try:
        return dataset.train_test_split(test_size=size if size < 1 else int(size), seed=seed)
    except ValueError as error:
        raise ConfigError(
            f"test_split_size={size}: the dataset has {len(dataset)} rows, of which some must be left to train on and "
            "some to evaluate on. Choose another size."
        ) from error
