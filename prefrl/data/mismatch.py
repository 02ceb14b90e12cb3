"""Completions of other prompts, from which KTO estimates its KL divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from prefrl.data.formats import AnyDataset, column_names
from prefrl.errors import DataError

__all__ = ["MISMATCHED", "with_mismatched_completions"]

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
