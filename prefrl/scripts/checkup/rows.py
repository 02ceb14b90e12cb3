"""Checks of the rows that a run trains on: columns, lengths, ends, duplicates, and how rows look as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from rich.table import Table
from rich.text import Text

from prefrl.data.chat import special_tokens
from prefrl.data.checks import (
    ID_COLUMNS,
    check_known_ids,
    check_positions,
    num_duplicates,
    warn_of_shared_rows,
    warn_of_unknown_end,
)
from prefrl.data.formats import column_names
from prefrl.data.rows import list_lengths
from prefrl.errors import DataError
from prefrl.generation.local.generator import end_token_ids
from prefrl.models.positions import position_limit
from prefrl.printable import printable
from prefrl.scripts.checkup.findings import Section, logged_into

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prefrl.scripts.checkup.subject import Subject

__all__ = ["ROWS_READ", "UNLIMITED", "check_columns", "check_rows", "first_rows", "row_lengths", "show_rows"]

ROWS_READ = 1000
_MOST_CHARACTERS = 600  # of a part of a row that is shown
# What no limit holds for.
UNLIMITED = {"max_length": None, "max_prompt_length": None, "filter_overlong_prompts": False}


def first_rows(dataset: Any, count: int = ROWS_READ) -> datasets.Dataset | None:
    """The first rows of a dataset or stream, in memory; of several datasets, those of the first."""
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()), None)
    if dataset is None:
        return None
    if isinstance(dataset, datasets.IterableDataset):
        return datasets.Dataset.from_list(list(dataset.take(count)))
    return dataset.select(range(min(count, len(dataset))))


def check_columns(section: Section, dataset: Any) -> None:
    """Say what the dataset consists of, and which pairs have equal sides."""
    size = "a stream" if isinstance(dataset, datasets.IterableDataset) else f"{len(dataset):,} rows"
    section.ok(f"{size} with the columns {', '.join(column_names(dataset))}")
    rows = first_rows(dataset)
    if rows is None or not {"chosen", "rejected"} <= set(rows.column_names):
        return
    equal = [i for i, row in enumerate(rows) if row["chosen"] == row["rejected"]]
    if equal:
        section.warn(f"{len(equal)} of {len(rows)} pairs have chosen = rejected; the first is row {equal[0]}")


def check_rows(section: Section, subject: Subject, dataset: Any, eval_dataset: Any) -> datasets.Dataset | None:
    """Tokenize the first rows as the trainer does, and check them.

    Returns:
        The tokenized rows of the training dataset, truncated as the trainer truncates them.

    Raises:
        ConfigError: An option does not fit the data.
        DataError: Rows cannot be used.
    """
    raw, config, tokenizer = first_rows(dataset), subject.config, subject.tokenizer
    rows = _usable(section, subject, raw)
    check_known_ids(rows, tokenizer, num_embeddings=subject.num_embeddings, columns=ID_COLUMNS)
    check_positions(rows, position_limit(subject.model), config.length_bound, columns=ID_COLUMNS)
    if not subject.is_online and subject.model.can_generate():
        warn_of_unknown_end(rows, tokenizer, end_ids=end_token_ids(subject.model, tokenizer))
    section.shown.append(_table_of_lengths(section, subject, _without_invalid(subject, raw, **UNLIMITED)))
    _check_special_tokens(section, subject, rows)
    if duplicates := num_duplicates(rows, columns=ID_COLUMNS):
        section.warn(f"{duplicates} of {len(rows)} rows repeat an earlier row")
    if (evaluated := first_rows(eval_dataset)) is not None:
        warn_of_shared_rows(rows, subject.tokenized(evaluated), columns=ID_COLUMNS)
        section.ok("training and evaluation rows were compared")
    return rows


def _usable(section: Section, subject: Subject, raw: Any) -> datasets.Dataset:
    """The rows as the trainer tokenizes them; those that it refuses are a problem, and left out."""
    try:
        return subject.tokenized(raw)
    except DataError as error:
        section.problem(str(error))
    return _without_invalid(subject, raw)


def _without_invalid(subject: Subject, raw: Any, **changes: Any) -> datasets.Dataset:
    """The rows that can be used; that others are left out is known already."""
    with logged_into(Section("Rows")):
        return subject.tokenized(raw, invalid_rows="drop", **changes)


def row_lengths(rows: datasets.Dataset) -> dict[str, NDArray[np.int64]]:
    """Tokens of each row, for each column of ids."""
    return {name: list_lengths(rows, name) for name in ID_COLUMNS if name in rows.column_names}


def _table_of_lengths(section: Section, subject: Subject, rows: datasets.Dataset) -> Table:
    config = subject.config
    option = "max_prompt_length" if subject.is_online else "max_length"
    limit = getattr(config, option)
    lengths = row_lengths(rows)
    if not subject.is_online and len(lengths) > 1:  # the limit is for a prompt with its longest completion
        sides = [lengths[name] for name in lengths if name != "prompt_ids"]
        lengths["whole row"] = lengths.get("prompt_ids", 0) + np.maximum.reduce(sides)
    table = Table("tokens", "shortest", "median", "95 %", "longest", box=None, header_style="dim")
    for name, counts in lengths.items():
        quantiles = np.quantile(counts, [0, 0.5, 0.95, 1])
        table.add_row(name, *(f"{int(value):,}" for value in quantiles))
    counts = list(lengths.values())[-1]
    num_long = 0 if limit is None else int((counts > limit).sum())
    if num_long:
        section.warn(
            f"{num_long} of {len(counts)} rows have more than {option}={limit} tokens and are truncated, or dropped "
            "if the options say so"
        )
    elif limit is not None:
        section.ok(f"no row has more than {option}={limit} tokens")
    return table


def _check_special_tokens(section: Section, subject: Subject, rows: datasets.Dataset) -> None:
    tokenizer = subject.tokenizer
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    section.ok(", ".join(f"{name} {value!r}" for name, value in names.items()))
    column = next(name for name in ("input_ids", "prompt_ids", "chosen_ids") if name in rows.column_names)
    texts = rows[column][:]
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id:
        twice = sum(ids[:2] == [bos, bos] for ids in texts)
        if twice:
            section.warn(f"{twice} of {len(texts)} rows begin with {tokenizer.bos_token!r} twice")
    if subject.is_online:
        return
    ending = next(name for name in ("input_ids", "chosen_ids", "completion_ids") if name in rows.column_names)
    ends = special_tokens(tokenizer)
    whole = sum(any(token in ends for token in tokenizer.convert_ids_to_tokens(ids[-3:])) for ids in rows[ending][:])
    text = f"{whole} of {len(rows)} rows of {ending} end with a special token, at which the model learns to stop"
    (section.ok if whole == len(rows) else section.warn)(text)


def show_rows(section: Section, subject: Subject, rows: datasets.Dataset, *, count: int = 3) -> None:
    """Show some rows as tokens: what is trained in green, what is context dim, special tokens reversed."""
    for number, row in enumerate(rows.select(range(min(count, len(rows))))):
        section.shown.append(Text(f"row {number}", style="bold"))
        section.shown += [_rendered(subject, name, parts) for name, parts in _parts(row)]


def _parts(row: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[int, bool]]]]:
    """Texts of a row by name: token ids, and whether they are trained."""
    if "input_ids" in row:
        yield "text", list(zip(row["input_ids"], row["trainable"], strict=True))
        return
    prompt = [(token_id, False) for token_id in row.get("prompt_ids") or ()]
    sides = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
    for name in sides:
        yield name.removesuffix("_ids"), [*prompt, *((token_id, True) for token_id in row[name])]
    if not sides:
        yield "prompt", prompt


def _rendered(subject: Subject, name: str, parts: list[tuple[int, bool]]) -> Text:
    tokenizer = subject.tokenizer
    special = set(tokenizer.all_special_ids) | set(tokenizer.convert_tokens_to_ids(list(special_tokens(tokenizer))))
    text = Text(f"{name}, {sum(trained for _, trained in parts)} of {len(parts)} tokens trained: ", style="dim")
    for trained, run in groupby(parts, key=lambda part: part[1]):
        if trained:
            text.append("[+", style="bold green")
        for is_special, tokens in groupby(run, key=lambda part: part[0] in special):
            style = "green" if trained else "dim"
            words = _shortened(printable(tokenizer.decode([token_id for token_id, _ in tokens])))
            text.append(words, style=f"reverse {style}" if is_special else style)
        if trained:
            text.append("+]", style="bold green")
    return text


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
