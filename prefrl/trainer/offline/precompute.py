"""Computes the reference log-probs of a whole dataset once, and caches them on disk."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from prefrl import distributed
from prefrl.data.packing import list_lengths
from prefrl.errors import ConfigError, DataError
from prefrl.models.fingerprint import joint_digest, rows_fingerprint
from prefrl.types import TokenBatch

logger = logging.getLogger(__name__)

# Column of tokens -> column of their log-probs, in the order in which batches lay out the responses.
REFERENCE_COLUMNS = {
    "chosen_ids": "ref_chosen_logprobs",
    "rejected_ids": "ref_rejected_logprobs",
    "completion_ids": "ref_logprobs",
    "KL_completion_ids": "ref_KL_logprobs",
}

# Increase this number when the same model and rows no longer give the same values, or when the file format changes.
_FILE_VERSION = 1
_FILE_KEY = b"prefrl"


def precompute_reference(
    dataset: datasets.Dataset,
    *,
    reference_logprobs: Callable[[TokenBatch], Tensor],
    collate: Callable[[list[dict[str, Any]]], TokenBatch],
    batch_size: int,
    weights: str,
    dtype: torch.dtype,
    temperature: float,
    cache_dir: Path | None = None,
) -> datasets.Dataset:
    """The dataset with the reference log-probs of all response tokens added; see `REFERENCE_COLUMNS`.

    Each row is scored once, on one of the ranks. A later call with the same weights, rows, dtype and temperature reads
    the cache instead. All ranks must call it. Unless all of them see the same files in `cache_dir`, every run scores
    again.

    Args:
        dataset: A prepared dataset with `prompt_ids` and either `chosen_ids` and `rejected_ids`, or `completion_ids`
            and optionally `KL_completion_ids`.
        reference_logprobs: Maps a batch on the host to [N] nats.
        collate: Lays out the responses of each row in the order of `REFERENCE_COLUMNS`, without empty ones.
        batch_size: Rows per batch.
        weights: Fingerprint of the reference's weights.
        dtype: The dtype that the reference computes in.
        temperature: Temperature of the scored distribution.
        cache_dir: Folder of the cache; None: `prefrl_reference` in the cache of `datasets`.

    Returns:
        All columns, plus columns of float32 lists, each as long as the list of tokens that it belongs to.

    Raises:
        ConfigError: The dataset is a stream.
        DataError: The cached file is damaged, or the reference gives values that are not finite.
    """
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"precompute_ref_log_probs=True with an {type(dataset).__name__}: every row is scored before training, "
            "which needs a dataset of known length. Give a datasets.Dataset, or set precompute_ref_log_probs=False."
        )
    tokens = {column: list_lengths(dataset, column) for column in REFERENCE_COLUMNS if column in dataset.column_names}
    images = [name for name in ("images",) if name in dataset.column_names]
    rows = rows_fingerprint(dataset, ["prompt_ids", *tokens, *images])
    fingerprint = joint_digest([_FILE_VERSION, weights, rows, str(dtype), temperature])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "prefrl_reference" if cache_dir is None else cache_dir
    path = folder / f"{fingerprint}.parquet"
    table = _read(path, fingerprint, tokens)
    if not all(distributed.gather_objects(table is not None)):
        order = np.argsort(-list_lengths(dataset, "prompt_ids") - sum(tokens.values()), kind="stable")
        if distributed.is_main():
            folder.mkdir(parents=True, exist_ok=True)  # fail before scoring if the folder cannot be created
        scored = _score(dataset, order, tokens, reference_logprobs, collate, batch_size)
        table = _table(scored, fingerprint, tokens)
        if distributed.is_main():
            _write(path, table)
        distributed.wait_for_all()  # so that the next call finds the file on every rank
    elif distributed.is_main():
        logger.info("Reference log-probs are read from %s", path)
    columns = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=fingerprint)
    return datasets.concatenate_datasets([dataset, columns], axis=1, split=dataset.split)


def _score(
    dataset: datasets.Dataset,
    order: Any,
    tokens: Mapping[str, Any],
    reference_logprobs: Callable[[TokenBatch], Tensor],
    collate: Callable[[list[dict[str, Any]]], TokenBatch],
    batch_size: int,
) -> dict[int, dict[str, Any]]:
    """[length] float32 log-probs of all rows, by row and token column. The rows of a batch have similar lengths.

    Sharded models need all ranks in every pass, so a rank that has one row less also scores the last row.
    """
    mine = order[distributed.rank() :: distributed.world_size()].tolist()
    mine += order[-1:].tolist() * (math.ceil(len(order) / distributed.world_size()) - len(mine))
    scored: dict[int, dict[str, Any]] = {}
    is_quiet = None if distributed.is_main() else True  # None: show the progress bar only on a terminal
    for start in datasets.utils.tqdm(range(0, len(mine), batch_size), desc="Reference log-probs", disable=is_quiet):
        rows = mine[start : start + batch_size]
        batch = collate([dataset[row] for row in rows])
        places = [(row, column) for row in rows for column in tokens if tokens[column][row]]
        if batch.row_lengths != tuple(tokens[column][row] for row, column in places):
            raise ValueError(f"rows {rows} are laid out as responses of {batch.row_lengths} tokens")
        logprobs = np.split(reference_logprobs(batch).float().cpu().numpy(), np.cumsum(batch.row_lengths)[:-1])
        for (row, column), values in zip(places, logprobs, strict=True):
            scored.setdefault(row, {})[column] = values
    return {row: values for part in distributed.gather_objects(scored) for row, values in part.items()}


def _table(scored: Mapping[int, Mapping[str, Any]], fingerprint: str, tokens: Mapping[str, Any]) -> pa.Table:
    arrays = {}
    for column, lengths in tokens.items():
        values = np.concatenate([scored[row][column] for row in np.flatnonzero(lengths).tolist()] or [np.zeros(0)])
        if not np.isfinite(values).all():
            raise DataError(
                f"the reference gives log-probs of {column} that are not finite: nothing is saved. Score in another "
                "dtype (bf16=True instead of fp16=True), or look for such weights in the model."
            )
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        arrays[REFERENCE_COLUMNS[column]] = pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32()))
    table = pa.table(arrays)
    return table.replace_schema_metadata({_FILE_KEY: _label(fingerprint, table.num_rows)})


def _label(fingerprint: str, num_rows: int) -> bytes:
    return json.dumps({"fingerprint": fingerprint, "num_rows": num_rows}).encode()


def _write(path: Path, table: pa.Table) -> None:
    """Write to a temporary name, then rename: a killed run leaves no partial file, and runs do not mix their files."""
    unfinished = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.unfinished")
    try:
        pq.write_table(table, unfinished, write_page_checksum=True, use_dictionary=False, compression="none")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, fingerprint: str, tokens: Mapping[str, Any]) -> pa.Table | None:
    """The table in the file; None if there is no file."""
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    if (table.schema.metadata or {}).get(_FILE_KEY) != _label(fingerprint, table.num_rows):
        raise _damaged(path, "was written for other weights or rows")
    if table.column_names != [REFERENCE_COLUMNS[column] for column in tokens]:
        raise _damaged(path, f"has the columns {table.column_names}")
    for column, lengths in tokens.items():
        found = pc.list_value_length(table[REFERENCE_COLUMNS[column]]).to_numpy()
        if not np.array_equal(found, lengths):
            raise _damaged(path, f"has log-probs of {len(found)} rows with other numbers of tokens than {column}")
    return table


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"the saved reference log-probs in {path} do not fit: the file {what}. Delete it, and they are computed again."
    )
