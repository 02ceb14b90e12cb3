"""Rows of prompts, and files of rows with responses: what `prefrl generate` writes and `prefrl eval` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError, DataError
from prefrl.options.suggest import nearest
from prefrl.scripts.arguments.dataset_columns import SHAPING, ColumnArguments
from prefrl.scripts.arguments.dataset_config import DatasetConfig, load_part

__all__ = ["RESPONSES", "check_output_file", "load_rows", "write_rows"]

RESPONSES = "responses"  # the column of a file that holds the responses of each row
_SUFFIXES = (".jsonl", ".parquet")


def load_rows(
    dataset: str, split: str | None, *, column: str, options: ColumnArguments | None = None
) -> list[dict[str, Any]]:
    """The rows of a dataset.

    Args:
        dataset: A name on the Hub, a folder or a file.
        split: Its split; None: the whole of a file, otherwise "test".
        column: A column that it must have.
        options: What to make of its columns before.

    Raises:
        DataError: It cannot be loaded, is empty, or lacks the column.
    """
    split = split or ("train" if Path(dataset).is_file() else "test")
    shaping: dict[str, Any] = {} if options is None else {name: getattr(options, name) for name in SHAPING}
    loaded: Any = load_part(
        DatasetConfig(path=dataset, split=split, **shaping),
        streaming=False,
        path_option="dataset_name",
        split_option="dataset_split",
    )
    if column not in loaded.column_names:
        remedy = nearest(column, loaded.column_names)
        raise DataError(f"dataset_name={dataset!r}: has no column {column!r}. {remedy}")
    rows: list[dict[str, Any]] = loaded.to_list()
    if not rows:
        raise DataError(f"dataset_name={dataset!r} with dataset_split={split!r}: has no rows")
    return rows


def check_output_file(option: str, path: str) -> None:
    """Refuse a name that does not say what kind of file it is.

    Raises:
        ConfigError: It ends neither in .jsonl nor in .parquet.
    """
    if not path.endswith(_SUFFIXES):
        raise ConfigError(f"{option}={path!r}: must end in {' or '.join(_SUFFIXES)}")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines or parquet, as the name of the file says.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(rows)), path)
            return
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
