"""The data that a script trains on: one dataset, or a mixture of several."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from prefrl.errors import ConfigError, DataError
from prefrl.options.fields import check_fields, opt
from prefrl.options.suggest import nearest

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

    from prefrl.data.formats import AnyDataset

__all__ = ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments", "get_dataset", "load_part", "load_parts"]

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class ScriptArguments:
    """Options of a single dataset.

    Raises:
        ConfigError: `ignore_bias_buffers` is set.
    """

    dataset_name: str | None = opt(
        None, "Dataset: a name on the Hub, a folder, or a .json, .jsonl or .parquet file. Set this or datasets."
    )
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_revision: str | None = opt(None, "Branch, tag or commit of a dataset on the Hub.")
    dataset_train_split: str = opt("train", "Split to train on; slices such as train[:90%] work.")
    dataset_test_split: str = opt("test", "Split to evaluate on; read only if eval_strategy is not no.")
    dataset_streaming: bool = opt(False, "Read datasets as streams during training. Needs max_steps.")
    ignore_bias_buffers: bool = opt(False, "Must stay False: ddp_broadcast_buffers=False is the option for this.")

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            raise ConfigError(
                "ignore_bias_buffers=True: is not there. Set ddp_broadcast_buffers=False, with which DDP sends no "
                "buffers."
            )


@dataclass
class DatasetConfig:
    """A dataset, or one part of a mixture.

    Args:
        path: A name on the Hub, a folder, or a .json, .jsonl or .parquet file.
        name: Configuration of a dataset that has several.
        data_dir: As in `datasets.load_dataset`.
        data_files: As in `datasets.load_dataset`.
        split: The split; slices such as train[:90%] work.
        columns: The columns to keep; None: all.
        fraction: Its share of the mixture's rows, relative to the others: each part gives its first rows, as many as
            its share allows, and no row occurs twice.
        weight: How often a row is drawn from it, relative to the others: rows are drawn at random until a part ends.
        revision: Branch, tag or commit on the Hub.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None
    weight: float | None = None
    revision: str | None = None


@dataclass
class DatasetMixtureConfig:
    """Options of a mixture of datasets; `get_dataset` loads it.

    Raises:
        ConfigError: An entry cannot be read, or options exclude each other.
    """

    datasets: list[DatasetConfig] = opt(
        [],
        "Datasets to mix: a list in the YAML file, JSON on the command line. Each has a path and may have name, "
        "data_dir, data_files, split, revision, columns (those to keep) and weight or fraction (its share of the "
        "rows, relative to the others; without them all rows are read).",
    )
    streaming: bool = opt(False, "Read datasets as streams. Needs max_steps.")
    test_split_size: Annotated[float, Gt(0)] | None = opt(
        None, "Evaluate on this share of the rows of datasets, or on this number of them, and train on the others."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        # Entries are mappings in a YAML file, and texts on the command line: paths, or JSON.
        self.datasets = [part for i, entry in enumerate(self.datasets) for part in _parts(f"datasets[{i}]", entry)]
        for i, part in enumerate(self.datasets):
            _check_part(f"datasets[{i}]", part)
        self._check_shares()

    def _check_shares(self) -> None:
        for name in ("fraction", "weight"):
            given = [getattr(part, name) is not None for part in self.datasets]
            if any(given) and not all(given):
                raise ConfigError(f"datasets: some have a {name} and others do not. Give it to all, or to none.")
        has_fraction, has_weight = (any(getattr(p, n) for p in self.datasets) for n in ("fraction", "weight"))
        if has_fraction and has_weight:
            raise ConfigError("datasets: fraction and weight are given. Remove one of them.")
        if self.streaming and (has_fraction or self.test_split_size is not None):
            name = "fraction" if has_fraction else "test_split_size"
            remedy = "Give weight instead." if has_fraction else "Name a split for evaluation."
            raise ConfigError(f"streaming=True and {name}: a stream has no length to take a share of. {remedy}")


def get_dataset(mixture_config: DatasetMixtureConfig, *, seed: int = 42) -> DatasetDict | IterableDatasetDict:
    """Load and mix the datasets of a mixture.

    Args:
        mixture_config: The datasets.
        seed: Of the draws by `weight`, and of the split by `test_split_size`: all processes get the same rows.

    Returns:
        Split "train", and with `test_split_size` also "test".

    Raises:
        ConfigError: There are no datasets.
        DataError: A dataset cannot be loaded, is empty, or its columns are not those of the others.
    """
    import datasets  # not needed for --help

    from prefrl.data.mixture import mix_datasets

    if not mixture_config.datasets:
        raise ConfigError("datasets=[]: a mixture needs at least one dataset. Set datasets.")
    configs = _named(mixture_config.datasets)
    parts = load_parts(mixture_config.datasets, streaming=mixture_config.streaming)
    if mixture_config.datasets[0].fraction is not None:
        parts = _first_rows(parts, {name: config.fraction or 0.0 for name, config in configs.items()})
    weights = {name: config.weight for name, config in configs.items() if config.weight is not None}
    mixture = mix_datasets(parts, weights=weights or None, seed=seed, stopping="first_exhausted")
    if isinstance(mixture, datasets.IterableDataset):
        return datasets.IterableDatasetDict({"train": mixture})
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": mixture})
    size = mixture_config.test_split_size
    return mixture.train_test_split(test_size=size if size < 1 else int(size), seed=seed)


def load_parts(parts: Sequence[DatasetConfig], *, streaming: bool) -> dict[str, AnyDataset]:
    """Each dataset by the last component of its path, with a number where that is ambiguous.

    Raises:
        ConfigError: Options exclude each other.
        DataError: One cannot be loaded.
    """
    return {name: load_part(part, streaming=streaming) for name, part in _named(parts).items()}


def load_part(
    part: DatasetConfig, *, streaming: bool, path_option: str = "datasets.path", split_option: str = "split"
) -> AnyDataset:
    """Load one dataset. The names of the options are for error messages.

    Raises:
        ConfigError: Options exclude each other.
        DataError: It cannot be loaded.
    """
    import datasets  # not needed for --help

    file_format = _FORMATS.get(Path(part.path).suffix)
    files = part.data_files if file_format is None else part.path
    if file_format is not None and not Path(part.path).is_file():
        raise DataError(f"{path_option}={part.path!r}: there is no such file")
    if file_format is not None and (part.data_files, part.data_dir) != (None, None):
        raise ConfigError(f"{path_option}={part.path!r} is a file: remove data_files and data_dir")
    if part.revision is not None and Path(part.path).exists():
        raise ConfigError(f"{path_option}={part.path!r} is on this machine: revision={part.revision!r} is of the Hub")
    try:
        dataset: AnyDataset = datasets.load_dataset(
            file_format or part.path,
            part.name,
            data_dir=part.data_dir,
            data_files=files,
            split=part.split,
            revision=part.revision,
            streaming=streaming,
        )
        return dataset if part.columns is None else dataset.select_columns(part.columns)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        where = f"{path_option}={part.path!r} with {split_option}={part.split!r}"
        # datasets puts the place and the cause of a damaged file into the error that its own one comes from.
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        held_out = (
            f" Name held-out rows, such as {split_option}='train[90%:]'." if "Unknown split" in str(error) else ""
        )
        raise DataError(f"{where} cannot be loaded: {reason or error}{held_out}") from error


def _first_rows(parts: dict[str, AnyDataset], fractions: dict[str, float]) -> dict[str, AnyDataset]:
    """The first rows of each dataset, in these proportions, as many as there are without repeating one.

    A dataset whose share is less than half a row is left out.
    """
    rows_per_share = min(len(part) / fractions[name] for name, part in parts.items())
    counts = {name: round(fraction * rows_per_share) for name, fraction in fractions.items()}
    return {name: part.select(range(counts[name])) for name, part in parts.items() if counts[name]}


def _named(parts: Sequence[DatasetConfig]) -> dict[str, DatasetConfig]:
    stems = [Path(part.path).stem for part in parts]
    return {
        stem if stems.count(stem) == 1 else f"{stem}_{i}": part
        for i, (stem, part) in enumerate(zip(stems, parts, strict=True))
    }


def _parts(where: str, entry: Any) -> list[DatasetConfig]:
    """The datasets of an entry: several if it is the JSON text of a list."""
    if isinstance(entry, str):
        entry = DatasetConfig(entry)
    if isinstance(entry, DatasetConfig):
        if not (isinstance(entry.path, str) and entry.path.startswith(("[", "{"))):
            return [entry]
        try:
            entry = json.loads(entry.path)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f'{where}={entry.path!r}: must be a path, or JSON such as {{"path": "a.jsonl"}}: {error}'
            ) from error
    if isinstance(entry, list):
        return [part for one in entry for part in _parts(where, one)]
    if not isinstance(entry, dict) or "path" not in entry:
        raise ConfigError(f"{where}={entry!r}: must be a mapping with at least a path")
    known = [field.name for field in dataclasses.fields(DatasetConfig)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}. {nearest(str(key), known)}")
    return [DatasetConfig(**entry)]


def _check_part(where: str, part: DatasetConfig) -> None:
    for key in ("path", "name", "data_dir", "split", "revision"):
        value = getattr(part, key)
        if not isinstance(value, str) and (value is not None or key in ("path", "split")):
            raise ConfigError(f"{where}.{key}={value!r}: must be a string")
    if part.columns is not None and not (isinstance(part.columns, list) and part.columns):
        raise ConfigError(f"{where}.columns={part.columns!r}: must be a list of names")
    for key in ("fraction", "weight"):
        value = getattr(part, key)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"{where}.{key}={value!r}: must be a number > 0. Leave the dataset out to drop it.")
