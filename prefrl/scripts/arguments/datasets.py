"""The data that a script trains on: one dataset or a mixture of several, and how columns become those of a trainer."""

from __future__ import annotations

import dataclasses
import json
import logging
import string
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from prefrl.errors import ConfigError, DataError, cause_of
from prefrl.options.fields import check_fields, opt, parse_json
from prefrl.options.names import nearest
from prefrl.scripts.arguments.own_datasets import bad_line, code_of, dataset_of_code, delimiter, not_utf8

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

    from prefrl.data.formats import AnyDataset
    from prefrl.data.sources import RowShape

# The options of `ColumnArguments`, which are keys of a part of a mixture, too.
SHAPING = ("columns", "prompt_template", "system_prompt", "conversational")
_EXAMPLE = "Write {prompt: question}, the new name and then the dataset's own"


@dataclass(kw_only=True)
class ColumnArguments:
    """How the columns of a single dataset become prompts and messages.

    Raises:
        ConfigError: An option cannot be read.
    """

    GROUP: ClassVar[str] = "Columns of the dataset"

    columns: dict[str, str] | str | None = opt(
        None,
        "Columns to rename. {prompt: question} makes the dataset's question the prompt. The other columns are kept, "
        "and rewards can read them. On the command line, give it as JSON.",
    )
    prompt_template: str | None = opt(
        None,
        "Text of the prompt, with columns of the dataset in braces. An example is 'Question: {question} Answer:'. "
        "Literal braces are doubled. In conversations, this is the user's message.",
    )
    system_prompt: str | None = opt(
        None,
        "System message for each conversation that does not begin with one. Plain-text prompts and answers become "
        "messages.",
    )
    conversational: bool = opt(
        False, "Turn plain-text prompts and answers into messages of the user and the assistant."
    )

    def __post_init__(self) -> None:
        parse_json(self, "columns")
        check_columns(self)


@dataclass(frozen=True)
class ColumnNames:
    """Columns by new name.

    Args:
        renamed: Each new name, and the name that the dataset has for it.
        kept: The new names of the columns to keep. None means all are kept.
    """

    renamed: dict[str, str]
    kept: list[str] | None


def check_columns(options: Any, where: str = "") -> None:
    """Check the options `columns`, `prompt_template` and `system_prompt` as far as they can be without the dataset.

    Args:
        options: Has these options.
        where: What precedes their names in messages, such as "datasets[1].".

    Raises:
        ConfigError: One cannot be read.
    """
    _names(options.columns, f"{where}columns={options.columns!r}")
    for name in ("prompt_template", "system_prompt"):
        value = getattr(options, name)
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{where}{name}={value!r}: must be a text that is not empty")
    if not isinstance(options.conversational, bool):
        raise ConfigError(f"{where}conversational={options.conversational!r}: must be true or false")
    if options.prompt_template is not None:
        _check_template(options.prompt_template, f"{where}prompt_template={options.prompt_template!r}")


def shape_of(options: Any) -> RowShape | None:
    """What the options, which `check_columns` has accepted, make of a dataset. None means they leave it as it is."""
    columns = _names(options.columns, "columns")
    if not (columns.renamed or options.prompt_template or options.system_prompt or options.conversational):
        return None
    from prefrl.data.sources import RowShape  # needs datasets, which --help does not

    return RowShape(
        renamed=columns.renamed,
        kept=columns.kept,
        prompt_template=options.prompt_template,
        system_prompt=options.system_prompt,
        conversational=options.conversational,
    )


def _names(columns: Any, where: str) -> ColumnNames:
    if columns is None:
        return ColumnNames({}, None)
    is_list = isinstance(columns, list)
    entries = columns if is_list else [columns]
    if not entries or not all(isinstance(entry, dict) or (is_list and isinstance(entry, str)) for entry in entries):
        raise ConfigError(f"{where}: must be a list of names, or a mapping. {_EXAMPLE}")
    pairs = [pair for entry in entries for pair in (entry.items() if isinstance(entry, dict) else [(entry, entry)])]
    if not pairs or not all(isinstance(name, str) and name for pair in pairs for name in pair):
        raise ConfigError(f"{where}: must hold names of columns. {_EXAMPLE}")
    for side, names in (("new", [new for new, _ in pairs]), ("dataset's", [old for _, old in pairs])):
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"{where}: names the {side} column {twice[0]!r} twice")
    return ColumnNames(dict(pairs), [new for new, _ in pairs] if is_list else None)


def _check_template(template: str, where: str) -> None:
    try:
        fields = [(field, spec) for _, field, spec, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be read: {error}. Double literal braces: {{{{ and }}}}") from error
    for field, spec in fields:
        if not field or field.isdigit() or set(field) & set(".[]") or "{" in (spec or ""):
            raise ConfigError(
                f"{where}: {{{field}}} is not a column name. Write names such as {{question}}, and double "
                "literal braces: {{ and }}"
            )
    if not fields:
        raise ConfigError(f"{where}: names no column. Write one in braces, such as {{question}}")


_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".txt": ("text", {}),
}
# Endings of the files that are read, with the format of each in `datasets` and its arguments.
_FORMATS = {**_TEXTS, **{f"{ending}.gz": form for ending, form in _TEXTS.items()}, ".parquet": ("parquet", {})}
FILES = "a .parquet, .csv, .tsv, .txt, .json or .jsonl file; all but the first may end in .gz"


@dataclass
class ScriptArguments(ColumnArguments):
    """Options of a single dataset.

    Raises:
        ConfigError: `ignore_bias_buffers` is set, or an option of columns cannot be read.
    """

    dataset_name: str | None = opt(
        None, f"Dataset: a name on the Hub, a folder or a file. Files: {FILES}. Set this or datasets."
    )
    dataset_config: str | None = opt(None, "Name of the dataset's configuration, if it has several.")
    dataset_revision: str | None = opt(None, "Branch, tag or commit of a dataset on the Hub.")
    dataset_train_split: str = opt("train", "Split to train on. Slices such as train[:90%] work.")
    dataset_test_split: str = opt("test", "Split to evaluate on. It is read only if eval_strategy is set.")
    dataset_streaming: bool = opt(False, "Read datasets as streams during training. Needs max_steps.")
    ignore_bias_buffers: bool = opt(False, "This must stay False. Use ddp_broadcast_buffers=False instead.")

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            raise ConfigError(
                "ignore_bias_buffers=True: is not supported. Set ddp_broadcast_buffers=False, with which DDP sends no "
                "buffers."
            )
        super().__post_init__()


@dataclass
class DatasetConfig:
    """A dataset, or one part of a mixture.

    Args:
        path: A name on the Hub, a folder, or a .parquet, .csv, .tsv, .txt, .json or .jsonl file; all but the first may
            end in .gz.
        name: Configuration of a dataset that has several.
        data_dir: As in `datasets.load_dataset`.
        data_files: As in `datasets.load_dataset`.
        split: The split. Slices such as train[:90%] work.
        columns: New names of columns, and the dataset's own names: {"prompt": "question"}. A list of names, and of
            such mappings, also says which columns to keep: ["answer", {"prompt": "question"}]. The default is all
            columns, unchanged.
        fraction: Its share of the mixture's rows, relative to the others. Each part contributes its first rows, as
            many as its share allows, and no row occurs twice.
        weight: How often a row is drawn from it, relative to the others. Rows are drawn at random until a part ends.
        revision: Branch, tag or commit on the Hub.
        prompt_template: Text of the column prompt, with the dataset's columns in braces: "Q: {question}". Literal
            braces are doubled. In conversations it is the user's message.
        system_prompt: System message for each conversation that does not begin with one. Prompts and answers that are
            texts become messages.
        conversational: Make messages of the user and the assistant of prompts and answers that are texts.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str | dict[str, str]] | dict[str, str] | None = None
    fraction: float | None = None
    weight: float | None = None
    revision: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    conversational: bool = False


@dataclass
class DatasetMixtureConfig:
    """Options of a mixture of datasets; `get_dataset` loads it.

    Raises:
        ConfigError: An entry cannot be read, or options contradict each other.
    """

    datasets: list[DatasetConfig] = opt(
        [],
        "Datasets to mix: a list in the YAML file. On the command line, give it as JSON. Each has a path and may have "
        "name, data_dir, data_files, split, revision, columns (a mapping as for one dataset, or a list of those to "
        "keep), prompt_template, system_prompt, conversational, and weight or fraction (its share of the rows, "
        "relative to the others; without them all rows are read).",
    )
    streaming: bool = opt(False, "Read datasets as streams. Needs max_steps.")
    test_split_size: Annotated[float, Gt(0)] | None = opt(
        None,
        "Fraction or number of the training rows to evaluate on instead. They are drawn at random, and the rest is "
        "trained on.",
    )

    def __post_init__(self) -> None:
        # Entries are mappings in a YAML file, and texts on the command line: paths, or JSON.
        self.datasets = parts_of("datasets", self.datasets)
        check_fields(self, of=DatasetMixtureConfig)
        if self.test_split_size is not None and self.test_split_size >= 1 and self.test_split_size % 1:
            raise ConfigError(
                f"test_split_size={self.test_split_size}: must be a fraction below 1, or a whole number of rows"
            )
        self._check_shares()

    def _check_shares(self) -> None:
        for name in ("fraction", "weight"):
            given = [getattr(part, name) is not None for part in self.datasets]
            if any(given) and not all(given):
                raise ConfigError(f"datasets: some have a {name} and others do not. Give it to all, or to none.")
        has_fraction, has_weight = (any(getattr(p, n) for p in self.datasets) for n in ("fraction", "weight"))
        if has_fraction and has_weight:
            raise ConfigError("datasets: both fraction and weight are given. Remove one of them.")
        if self.streaming and (has_fraction or self.test_split_size is not None):
            name = "fraction" if has_fraction else "test_split_size"
            remedy = "Give weight instead." if has_fraction else "Name a split for evaluation."
            raise ConfigError(
                f"streaming=True and {name}: a stream has no length, so there is no fraction of it. {remedy}"
            )


def get_dataset(mixture_config: DatasetMixtureConfig, *, seed: int = 42) -> DatasetDict | IterableDatasetDict:
    """Load and mix the datasets of a mixture.

    Args:
        mixture_config: The datasets.
        seed: Seed for the draws by `weight` and the split by `test_split_size`. All processes get the same rows.

    Returns:
        A split "train", and with `test_split_size` also a split "test".

    Raises:
        ConfigError: The mixture has no datasets.
        DataError: A dataset cannot be loaded, is empty, or its columns are not those of the others.
    """
    import datasets  # not needed for --help

    from prefrl.data.sources import mix_datasets, split_off

    if not mixture_config.datasets:
        raise ConfigError("datasets=[]: a mixture needs at least one dataset. Set datasets.")
    configs = _named(mixture_config.datasets)
    parts = load_parts(mixture_config.datasets, streaming=mixture_config.streaming)
    if mixture_config.datasets[0].fraction is not None:
        parts = _first_rows(parts, {name: config.fraction or 0.0 for name, config in configs.items()})
    weights = {name: config.weight for name, config in configs.items() if config.weight is not None}
    try:
        mixture = mix_datasets(parts, weights=weights or None, seed=seed, stopping="first_exhausted")
    except DataError as error:  # names the dataset, and here the option
        raise DataError(f"datasets: {error}") from error
    if isinstance(mixture, datasets.IterableDataset):
        return datasets.IterableDatasetDict({"train": mixture})
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": mixture})
    return split_off(mixture, mixture_config.test_split_size, seed=seed)


def load_parts(parts: Sequence[DatasetConfig], *, streaming: bool, option: str = "datasets") -> dict[str, AnyDataset]:
    """Each dataset by the last component of its path, with a number where that is ambiguous.

    Args:
        parts: The datasets.
        streaming: Read them as streams.
        option: The option that lists them, for messages.

    Raises:
        ConfigError: Options exclude each other.
        DataError: One cannot be loaded, or lacks a column.
    """
    named = _named(parts).items()
    return {
        name: load_part(part, streaming=streaming, within=f"{option}[{i}].") for i, (name, part) in enumerate(named)
    }


def load_part(
    part: DatasetConfig,
    *,
    streaming: bool,
    path_option: str = "path",
    split_option: str = "split",
    within: str = "",
) -> AnyDataset:
    """Load one dataset, and give it the columns that its options ask for.

    Args:
        part: The dataset.
        streaming: Read it as a stream.
        path_option: The name of the option `path`, for messages.
        split_option: The name of the option `split`, for messages.
        within: What precedes the names of options in messages.

    Raises:
        ConfigError: Options exclude each other.
        DataError: It cannot be loaded, or lacks a column.
    """
    where = f"{within}{path_option}={part.path!r}"
    shape = shape_of(part)
    if (code := code_of(part, where)) is not None:
        dataset = dataset_of_code(code, part.split, split_option=split_option, streaming=streaming)
        return dataset if shape is None else shape.apply(dataset, within=within)
    path, arguments = source_of(part, where)
    import datasets  # not needed for --help, or to see that a file is missing

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # the error below says what they would
    try:
        with _from_hub(path) if path == part.path and "://" not in path else nullcontext():
            dataset = datasets.load_dataset(
                path, part.name, split=part.split, revision=part.revision, streaming=streaming, **arguments
            )
    except StopIteration as error:  # datasets' reader of JSON lets it out for a file without rows
        raise DataError(f"{where}: has no rows") from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # datasets puts the place and the cause of a damaged file into the error that its own one comes from.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = bad_line(Path(part.path)) or not_utf8(Path(part.path)) or cause
        named = f" Name held-out rows, such as {split_option}='train[90%:]'." if "Unknown split" in str(error) else ""
        what = f"{where} with {split_option}={part.split!r}"
        raise DataError(f"{what} cannot be loaded: {reason or error}{named}") from cause_of(error)
    return dataset if shape is None else shape.apply(dataset, within=within)


def _from_hub(name: str) -> AbstractContextManager[None]:
    from prefrl.models.modes import hub_or_cache  # imports torch, which files do not need

    return hub_or_cache(name)


def _format_of(path: str) -> tuple[str, dict[str, Any]] | None:
    """How `datasets` reads a file with this name; None: not at all."""
    name = Path(path).name.lower()
    return next((form for ending, form in _FORMATS.items() if name.endswith(ending)), None)


def source_of(part: DatasetConfig, where: str) -> tuple[str, dict[str, Any]]:
    """What `datasets.load_dataset` is to read, and its arguments, as far as they are known without loading it.

    Args:
        part: The dataset.
        where: The option that names it, and its value, for messages.

    Raises:
        ConfigError: Options exclude each other.
        DataError: It is a file, and is missing or of an unknown format.
    """
    if (code := code_of(part, where)) is not None:
        code.look_up()  # in the file, which is not run
        return part.path, {}
    path = Path(part.path)
    is_here = path.exists()
    if part.revision is not None and is_here:
        raise ConfigError(f"{where} is on this machine, but revision={part.revision!r} is for the Hub")
    file_format = _format_of(part.path)
    if file_format is None and not path.is_file():
        return part.path, {"data_dir": part.data_dir, "data_files": part.data_files}
    if file_format is None:
        raise DataError(f"{where}: this file cannot be read. A dataset is a name on the Hub, a folder, or {FILES}")
    if not path.is_file():
        raise DataError(f"{where}: there is no such file")
    if (part.data_files, part.data_dir) != (None, None):
        raise ConfigError(f"{where} is a file: remove data_files and data_dir")
    separator = delimiter(path) if file_format[0] == "csv" else {}
    return file_format[0], {"data_files": part.path, **file_format[1], **separator}


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


def parts_of(option: str, entries: Sequence[Any], *, split: str = "train") -> list[DatasetConfig]:
    """The datasets that an option lists.

    Args:
        option: Its name.
        entries: Datasets, mappings, paths, or JSON text of them.
        split: Of those that say none; files have a single one.

    Raises:
        ConfigError: An entry cannot be read.
    """
    parts = [part for i, entry in enumerate(entries) for part in _parts(f"{option}[{i}]", entry, split)]
    for i, part in enumerate(parts):
        _check_part(f"{option}[{i}]", part)
    return parts


def _parts(where: str, entry: Any, split: str) -> list[DatasetConfig]:
    """The datasets of an entry: several if it is the JSON text of a list."""
    if isinstance(entry, str):
        entry = DatasetConfig(entry, split="train" if _format_of(entry) is not None else split)
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
        return [part for one in entry for part in _parts(where, one, split)]
    if not isinstance(entry, dict) or "path" not in entry:
        raise ConfigError(f"{where}={entry!r}: must be a mapping with at least a path")
    known = [field.name for field in dataclasses.fields(DatasetConfig)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}. {nearest(str(key), known)}")
    if "split" not in entry and not (isinstance(entry["path"], str) and _format_of(entry["path"]) is not None):
        entry = {**entry, "split": split}
    return [DatasetConfig(**entry)]


def _check_part(where: str, part: DatasetConfig) -> None:
    for key in ("path", "name", "data_dir", "split", "revision"):
        value = getattr(part, key)
        if not isinstance(value, str) and (value is not None or key in ("path", "split")):
            raise ConfigError(f"{where}.{key}={value!r}: must be a string")
    check_columns(part, f"{where}.")
    for key in ("fraction", "weight"):
        value = getattr(part, key)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"{where}.{key}={value!r}: must be a number > 0. Leave the dataset out to drop it.")
