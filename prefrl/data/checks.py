"""Checks of prepared datasets: ids, positions, ends and shared rows; reading cells that hold token ids."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow.compute as pc

from prefrl.data.chat import special_tokens
from prefrl.data.formats import AnyDataset
from prefrl.data.packing import is_packed, list_lengths
from prefrl.distributed import is_main
from prefrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from prefrl.models.plans import PositionLimit
    from prefrl.options.types import LengthBound

NOT_LEARNED = -100  # the label of a token without a loss


def with_lists(dataset: AnyDataset) -> AnyDataset:
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


logger = logging.getLogger(__name__)


def check_positions(
    dataset: AnyDataset, limit: PositionLimit | None, bound: LengthBound, *, columns: Sequence[str]
) -> AnyDataset:
    """Refuse rows with more tokens than a table of positions, or warn if the model computes positions.

    If the options bound all rows within the limit, nothing is read.

    Args:
        dataset: Prepared; a stream is checked while it is read.
        limit: Of the model; None: not known.
        bound: Of the rows.
        columns: Those of ids; the dataset may lack some.
    Returns:
        The dataset; of a stream, one with the check.
    Raises:
        DataError: Names the first row that is too long for a table of positions.
    """
    is_bounded = limit is not None and bound.max_length is not None and bound.max_length + bound.sampled <= limit.count
    if limit is None or is_bounded:
        return dataset
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(_StreamedCheck(limit, bound, columns), with_indices=True)
    lengths = _longest({name: list_lengths(dataset, name) for name in columns if name in dataset.column_names})
    if is_packed(dataset, columns):
        lengths = np.array([max(sequences) for sequences in dataset["seq_lengths"]])
    too_long = np.flatnonzero(lengths + bound.sampled > limit.count)
    if len(too_long):
        first = int(too_long[0])
        count = f"{len(too_long)} of {len(dataset)} rows of the tokenized dataset are too long: "
        _report(f"{count}row {first}", int(lengths[first]), limit, bound)
    return dataset


@dataclass
class _StreamedCheck:
    """Checks a row of a stream; warns once."""

    limit: PositionLimit
    bound: LengthBound
    columns: Sequence[str]
    has_warned: bool = False

    def __call__(self, row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        length = max(row.get("seq_lengths") or (0,))
        length = length or int(_longest({name: len(row.get(name) or ()) for name in self.columns}))
        if length + self.bound.sampled > self.limit.count and not self.has_warned:
            self.has_warned = True
            _report(f"row {index} of the stream", length, self.limit, self.bound)
        return row


def _longest(lengths: Mapping[str, Any]) -> Any:
    """The tokens of prompt and longest completion, or of the longest sequence; for each row, or for one."""
    others = [lengths[name] for name in lengths if name != "prompt_ids"]
    return lengths.get("prompt_ids", 0) + reduce(np.maximum, others, 0)


def _report(row: str, length: int, limit: PositionLimit, bound: LengthBound) -> None:
    sampled = f" in the prompt, and {bound.sampled} are sampled" if bound.sampled else ""
    message = f"{row} has {length} tokens{sampled}, but max_position_embeddings={limit.count} in the model's config"
    remedy = f"Lower {bound.options}, so that rows have at most {limit.count} tokens"
    if limit.is_table:
        raise DataError(f"{message}: it has no embeddings for further positions. {remedy}.")
    if is_main():
        logger.warning(
            "%s: it was not trained on further positions, unless rope scaling covers them. %s.", message, remedy
        )


# Columns of prepared datasets whose rows end as the model learns to end.
_COLUMNS = ("input_ids", "chosen_ids", "completion_ids")
# How many rows are searched for one that is not truncated before its end.
_ROWS_LOOKED_AT = 10


def last_written(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last tokens that are more than white space, of a row's last 8."""
    return [token_id for token_id in token_ids[-8:] if tokenizer.decode([token_id]).strip()]


def warn_of_unknown_end(dataset: Any, tokenizer: PreTrainedTokenizerBase, *, end_ids: Collection[int]) -> None:
    """Warn on the main process if rows end with a special token at which generation does not stop.

    Args:
        dataset: Prepared. The first of its rows that ends with a special token is checked. Streams are not read.
        tokenizer: Its own.
        end_ids: Where generation stops.
    """
    if not is_main() or not isinstance(dataset, datasets.Dataset):
        return
    special = special_tokens(tokenizer)
    for row in islice(dataset, _ROWS_LOOKED_AT):
        token_ids = next(row[name] for name in _COLUMNS if name in row)
        written = last_written(token_ids[: row.get("seq_lengths", [None])[0]], tokenizer)
        last = tokenizer.convert_ids_to_tokens(written[-1:])
        if not last or last[0] not in special:
            continue
        if written[-1] not in end_ids:
            ends = tokenizer.convert_ids_to_tokens(sorted(end_ids))
            logger.warning(
                "Rows end with %r (id %d), but generation stops only at %s. Add the id to "
                "model.generation_config.eos_token_id, which is saved with the model, or use a chat template that "
                "ends turns with such a token.",
                last[0],
                written[-1],
                " or ".join(map(repr, ends)),
            )
        return


# Depends on other rows of its dataset.
_NOT_OF_THE_ROW = "KL_completion_ids"


def warn_of_shared_rows(training: Any, evaluation: Any, *, columns: Sequence[str]) -> None:
    """Warn on the main process if rows of an evaluation dataset have the tokens of a row that is trained on.

    Of packed rows, the sequences are compared. Streams are not read.
    """
    parts = evaluation if isinstance(evaluation, Mapping) else {None: evaluation}
    parts = {name: part for name, part in parts.items() if isinstance(part, datasets.Dataset)}
    if not (is_main() and parts and isinstance(training, datasets.Dataset)):
        return
    evaluated = {name: list(_sequences(part, columns)) for name, part in parts.items()}
    wanted = {tokens for sequences in evaluated.values() for _, tokens in sequences}
    trained = {tokens for _, tokens in _sequences(training, columns) if tokens in wanted}
    for name, sequences in evaluated.items():
        shared = [row for row, tokens in sequences if tokens in trained]
        if shared:
            logger.warning(
                "%d of %d rows of eval_dataset%s are also in train_dataset; the first is row %d of the tokenized "
                "dataset. Their metrics do not show how the model does on new data. Remove them from one of the two.",
                len(shared),
                len(sequences),
                "" if name is None else f"[{name!r}]",
                shared[0],
            )


def num_duplicates(dataset: datasets.Dataset, *, columns: Sequence[str]) -> int:
    """How many rows of a prepared dataset have the tokens and images of an earlier one; it may lack columns."""
    hashes = [tokens for _, tokens in _sequences(dataset, columns)]
    return len(hashes) - len(set(hashes))


def _sequences(dataset: datasets.Dataset, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Row number and a hash of the tokens and images of each row, or of each sequence of a packed row."""
    names = [name for name in columns if name in dataset.column_names and name != _NOT_OF_THE_ROW]
    has_sequences, has_images = is_packed(dataset, columns), "images" in dataset.column_names
    if has_sequences and has_images:
        return  # images are not compared by sequence
    others = [*(["seq_lengths"] if has_sequences else []), *(["images"] if has_images else [])]
    selected = dataset.select_columns([*names, *others]).with_format("arrow")
    first = 0
    for table in selected.iter(_ROWS_AT_ONCE):
        tokens = zip(*(_lists(table[name]) for name in names), strict=True)
        if has_images:
            images = ([one["bytes"] or one["path"] for one in row or ()] for row in table["images"].to_pylist())
            for row, (lists, own) in enumerate(zip(tokens, images, strict=True), first):
                yield row, hash((*(ids.tobytes() for ids in lists), *own))
        elif has_sequences:
            for row, ((packed,), lengths) in enumerate(zip(tokens, _lists(table["seq_lengths"]), strict=True), first):
                yield from ((row, hash((ids.tobytes(),))) for ids in np.split(packed, np.cumsum(lengths)[:-1]))
        else:
            yield from ((row, hash(tuple(ids.tobytes() for ids in lists))) for row, lists in enumerate(tokens, first))
        first += len(table)


def _lists(column: pa.ChunkedArray) -> Iterator[NDArray[np.int32]]:
    """The lists of a column, without copies of their items."""
    lists = column.combine_chunks()
    offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
    return (items[start:stop] for start, stop in pairwise(offsets))
