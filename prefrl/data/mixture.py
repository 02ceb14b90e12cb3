"""Mix several datasets into one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import datasets

from prefrl.data.formats import AnyDataset, column_names
from prefrl.errors import ConfigError, DataError

__all__ = ["Stopping", "mix_datasets"]

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
