"""Token ids that the model has no embedding for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow.compute as pc

from prefrl.data.formats import AnyDataset
from prefrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ID_COLUMNS", "check_known_ids"]

# Of prepared datasets.
ID_COLUMNS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")
_ROWS_AT_ONCE = 10_000


def check_known_ids(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, *, num_embeddings: int, columns: Sequence[str]
) -> AnyDataset:
    """Refuse a prepared dataset in which an id occurs that the model has no embedding for; a stream while it is read.

    Args:
        dataset: Prepared.
        tokenizer: What made the ids. If it has no more entries than the model, nothing is read.
        num_embeddings: Of the model.
        columns: Those of ids; the dataset may lack some.
    Returns:
        The dataset; of a stream, one with the check.
    Raises:
        DataError: Names the first row with such an id, and the token.
    """
    if len(tokenizer) <= num_embeddings:
        return dataset
    if isinstance(dataset, datasets.IterableDataset):

        def checked(row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
            for name in columns:
                _check_rows([row.get(name)], name, index, tokenizer, num_embeddings)
            return row

        return dataset.map(checked, with_indices=True)
    for name in [name for name in columns if name in dataset.column_names]:
        tables = dataset.select_columns([name]).with_format("arrow").iter(_ROWS_AT_ONCE)
        for number, table in enumerate(tables):
            highest = pc.max(pc.list_flatten(table[name])).as_py()
            if highest is not None and highest >= num_embeddings:
                _check_rows(table[name].to_pylist(), name, number * _ROWS_AT_ONCE, tokenizer, num_embeddings)
    return dataset


def _check_rows(
    rows: Sequence[Sequence[int] | None],
    column: str,
    first_row: int,
    tokenizer: PreTrainedTokenizerBase,
    num_embeddings: int,
) -> None:
    for row, ids in enumerate(rows):
        highest = max(ids or [0])
        if highest >= num_embeddings:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise DataError(
                f"row {first_row + row} of the tokenized dataset, {column}: token {token!r} (id {highest}) has no "
                f"embedding, because the model has only {num_embeddings}. Remove the token from the data, use the "
                "model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
            )
