"""From the datasets that one has to the one that a trainer reads: its columns, and mixtures."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import datasets

from prefrl.data.formats import AnyDataset, Message, column_names, convert_message
from prefrl.errors import ConfigError, DataError
from prefrl.options.names import nearest

__all__ = ["RowShape", "mix_datasets"]

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
        names, makes_prompt = column_names(dataset), self.prompt_template is not None
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
        weights: The datasets are drawn from in proportion to these; they need not sum to 1. None: the datasets are
            concatenated, and `seed` and `stopping` are not used.
        seed: Seed of the draws.
        stopping: "first_exhausted": stop when one dataset has no more rows, so that no row is seen twice.
            "all_exhausted": stop when all rows have been seen, and restart datasets that end earlier.
    Raises:
        ConfigError: No datasets, or weights that are not positive or not one for each dataset.
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
    expected_names, found_names = column_names(expected), column_names(found)
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
