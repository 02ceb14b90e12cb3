"""Read the cells of datasets that hold token ids in the place of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets

from prefrl.data.formats import AnyDataset
from prefrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NOT_LEARNED", "num_ids_of", "plain", "read_flags", "read_ids", "read_labels"]

NOT_LEARNED = -100  # the label of a token without a loss


def plain(dataset: AnyDataset) -> AnyDataset:
    """The dataset with lists in its cells, although it was set to give arrays or tensors."""
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        return dataset
    return dataset.with_format(None)


def num_ids_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the tokenizer's largest id."""
    ids: Iterable[int] = tokenizer.get_vocab().values()
    return max(ids) + 1


def read_ids(row: Mapping[str, Any], column: str, num_ids: int) -> list[int]:
    """The token ids of a cell.

    Args:
        row: A row of a dataset.
        column: The name of the cell's column.
        num_ids: Ids are below it.
    Raises:
        DataError: The value is not a non-empty list of ids in 0 .. num_ids - 1.
    """
    ids = _read_integers(row, column)
    if not ids:
        raise DataError(f"column {column!r} has no token ids")
    wrong = next((token for token in ids if not 0 <= token < num_ids), None)
    if wrong is not None:
        raise DataError(
            f"column {column!r} has the id {wrong}: ids of the tokenizer are 0 to {num_ids - 1}. Tokenize with the "
            "model's own tokenizer, or pass the one that made the ids as processing_class"
        )
    return ids


def read_flags(row: Mapping[str, Any], column: str, length: int) -> list[bool]:
    """The flags of a cell, one for each of the row's `length` ids.

    Raises:
        DataError: The value is not a list of this length of 0 and 1.
    """
    flags = _read_integers(row, column)
    _check_length(flags, column, length)
    if not set(flags) <= {0, 1}:
        raise DataError(f"column {column!r} has the values {sorted(set(flags))}: must be 0 or 1 for each token")
    return [bool(flag) for flag in flags]


def read_labels(row: Mapping[str, Any], token_ids: Sequence[int]) -> list[bool]:
    """Which ids of a row are learned: those whose label is the id, and not -100.

    Raises:
        DataError: The value is not a list as long as the row, or a label is neither the id at its place nor -100.
    """
    labels = _read_integers(row, "labels")
    _check_length(labels, "labels", len(token_ids))
    for place, (label, token) in enumerate(zip(labels, token_ids, strict=True)):
        if label not in (token, NOT_LEARNED):
            raise DataError(
                f"column 'labels' has {label} at place {place}, where input_ids has {token}: a label is the id at "
                f"the same place, or {NOT_LEARNED} for a token without a loss. Do not shift labels"
            )
    return [label != NOT_LEARNED for label in labels]


def _read_integers(row: Mapping[str, Any], column: str) -> list[int]:
    value = row.get(column)  # a row of a stream may lack it
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise DataError(f"column {column!r} is {value!r:.80}: needs a list of integers")
    return value


def _check_length(values: Sequence[int], column: str, length: int) -> None:
    if len(values) != length:
        raise DataError(f"column {column!r} has {len(values)} values for the {length} tokens of input_ids")
