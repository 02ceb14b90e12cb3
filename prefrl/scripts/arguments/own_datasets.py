"""Datasets that code of the user makes, `dataset_name: my_data.py:MyDataset`; and files, before they are read."""

from __future__ import annotations

import gzip
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl.errors import ConfigError, DataError, reason_of
from prefrl.options.names import CodeName

if TYPE_CHECKING:
    from datasets import Dataset

    from prefrl.data.formats import AnyDataset

_CODE = re.compile(r"(?:.*\.py|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*(?:\(.*\))?", re.DOTALL)
_ONLY_SPLIT = "train"
_CONTRACT = (
    "It must be a class or a function that gives a datasets.Dataset, a datasets.IterableDataset, or rows: mappings of "
    "column names to values"
)


def code_of(part: Any, where: str) -> CodeName | None:
    """The code that a dataset's path names: `file.py:Name` or `module:Name`; None: it names data.

    Args:
        part: A `DatasetConfig`.
        where: The option that names it, and its value, for messages.

    Raises:
        ConfigError: The parameters cannot be read, or an option of data is given for code.
    """
    if not _CODE.fullmatch(part.path) or Path(part.path).exists():
        return None
    for key in ("name", "data_dir", "data_files", "revision"):
        if (value := getattr(part, key)) is not None:
            raise ConfigError(
                f"{where} is code, for which {key}={value!r} has no meaning. Give what it needs in parentheses, as in "
                "my_data.py:MyDataset(path='rows.txt')"
            )
    option, _, _ = where.partition("=")
    return CodeName.read(part.path, option)


def dataset_of_code(code: CodeName, split: str, *, split_option: str, streaming: bool) -> AnyDataset:
    """Call the code, and make a dataset of what it returns.

    It is called once for each split that is read, with the parameters in its name, and with `split="train"`, for
    example, if it has a parameter of this name; otherwise its rows are the split "train". All processes must get the
    same rows. Slices such as train[:90%] are taken from what it returns.

    Args:
        code: Names it.
        split: The split, perhaps sliced.
        split_option: The option that gives the split, for messages.
        streaming: Whether the rows are to be read as a stream.

    Raises:
        ConfigError: It cannot be imported or called, or has no such split.
        DataError: What it returns is no dataset.
    """
    import datasets  # not needed for --help

    make = code.load()
    accepted = _parameters_of(make, code)
    names = re.findall(r"(?:^|\+)\s*([\w.-]+)", split)
    if "split" not in accepted and any(name != _ONLY_SPLIT for name in names):
        raise ConfigError(
            f"{code.where} with {split_option}={split!r}: {code.name} has no parameter 'split', so all its rows are "
            f"the split 'train'. Add the parameter, or take rows of it, such as {split_option}='train[90%:]'."
        )
    given = {name: {**code.parameters, **({"split": name} if "split" in accepted else {})} for name in names}
    found = {name: _made(make, arguments, code) for name, arguments in given.items()}
    if names == [split.strip()]:
        (only,) = found.values()
        return only.to_iterable_dataset() if streaming and isinstance(only, datasets.Dataset) else only
    if streams := [name for name, part in found.items() if isinstance(part, datasets.IterableDataset)]:
        raise ConfigError(
            f"{code.where} with {split_option}={split!r}: {code.name} gives a stream, of which no rows can be "
            f"taken. Set {split_option}={streams[0]!r}"
        )
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(p) for name, p in found.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{code.where} with {split_option}={split!r}: cannot be read: {error}") from error
    rows = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
    dataset = datasets.concatenate_datasets(rows)
    return dataset.to_iterable_dataset() if streaming else dataset


def _parameters_of(make: Any, code: CodeName) -> Mapping[str, Any]:
    """The parameters of the code; those that its name gives must be among them."""
    if not callable(make):
        raise ConfigError(f"{code.where}: is a {type(make).__name__}. {_CONTRACT}")
    try:
        signature = inspect.signature(make)
    except ValueError:  # it has none that can be read
        return {}
    parameters = dict(signature.parameters)
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        parameters["split"] = parameters.get("split", Parameter("split", Parameter.KEYWORD_ONLY))
    try:
        signature.bind(**{**code.parameters, **({"split": _ONLY_SPLIT} if "split" in parameters else {})})
    except TypeError as error:
        raise ConfigError(
            f"{code.where}: {code.name} cannot be called like this: {error}. Its parameters are {signature}; write "
            f"them as {code.place}:{code.name}(parameter=value)"
        ) from error
    return parameters


def _made(make: Any, arguments: Mapping[str, Any], code: CodeName) -> Any:
    import datasets  # not needed for --help

    try:
        found = make(**arguments)
        if isinstance(found, datasets.Dataset | datasets.IterableDataset):
            return found
        is_indexed = (
            hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, Mapping | str)
        )
        if not is_indexed and (isinstance(found, Mapping | str) or not isinstance(found, Iterable)):
            raise DataError(f"{code.where}: gives a {type(found).__name__}. {_CONTRACT}")
        rows = [found[i] for i in range(len(found))] if is_indexed else list(found)
    except DataError:
        raise
    except Exception as error:  # the code is the user's, and may raise anything
        raise ConfigError(f"{code.where}: {code.name} failed: {reason_of(error)}") from error
    return _dataset_of(rows, code)


def _dataset_of(rows: list[Any], code: CodeName) -> Dataset:
    import datasets  # not needed for --help
    import pyarrow

    if not rows:
        raise DataError(f"{code.where}: has no rows")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{code.where}: row {number} is a {type(row).__name__}. {_CONTRACT}")
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{code.where}: the rows cannot be put into columns: {reason_of(error)}") from error


_DELIMITERS = (";", "\t", "|")


# The kinds of values that a column cannot hold together.
_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}


def bad_line(path: Path) -> str | None:
    """Where the first line is that is no JSON, or has a value of another kind than an earlier one in the same field.

    None if there is none, or if it is no file of lines of JSON.
    """
    if not path.is_file() or not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return None
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    number, kinds = 0, dict[str, tuple[str, int]]()
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line) if line.strip() else {}
                for name, value in row.items() if isinstance(row, dict) else ():
                    kind = _KINDS.get(type(value), "")
                    first, at = kinds.setdefault(name, (kind, number)) if kind else ("", 0)
                    if first != kind:
                        return f"{name!r} is {first} in line {at} and {kind} in line {number}. Give it one type"
    except json.JSONDecodeError as error:
        return f"line {number} is not JSON: {error.msg} in column {error.colno}"
    except (OSError, UnicodeDecodeError):
        return None  # what datasets says of it is better
    return None


def not_utf8(path: Path) -> str | None:
    """Where the first line is that is not UTF-8, and what to do; None if there is none, or if it is no plain text."""
    if not path.is_file() or path.suffix.lower() not in (".csv", ".json", ".jsonl", ".txt"):
        return None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return (
                    f"line {number} is not UTF-8, byte {error.start + 1} is 0x{line[error.start]:02x}. Convert the "
                    f"file, for example with iconv -f latin1 -t utf-8 {path} > {path.stem}-utf8{path.suffix}"
                )
    return None


def delimiter(path: Path) -> dict[str, str]:
    """The argument for a CSV file whose first line has another delimiter and no comma."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        header = file.readline(1 << 16).decode("utf-8", "replace")
    counts = {mark: header.count(mark) for mark in _DELIMITERS}
    found = max(_DELIMITERS, key=counts.__getitem__)
    return {"sep": found} if counts[found] and "," not in header else {}
