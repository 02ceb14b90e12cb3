"""Dataset formats: which columns a dataset may have, and what their values may be.

| kind | standard | conversational |
|---|---|---|
| language_modeling | `text`: str | `messages` (or `conversations`): list of messages |
| prompt_only | `prompt`: str | `prompt`: list of messages |
| prompt_completion | `prompt`, `completion`: str | `prompt`, `completion`: lists of messages |
| preference | `prompt`, `chosen`, `rejected`: str | `prompt`, `chosen`, `rejected`: lists of messages |
| preference, implicit prompt | `chosen`, `rejected`: str | `chosen`, `rejected`: lists of messages |
| unpaired | `prompt`, `completion`: str; `label`: bool | `prompt`, `completion`: lists of messages; `label`: bool |

With an implicit prompt, chosen and rejected are whole texts or conversations, and their common start is the prompt. A
text `prompt` beside chosen and rejected conversations only repeats their start, and is not read. A message is
`{"role": ..., "content": ...}`; `{"from": ..., "value": ...}` is converted. Datasets are map-style or streams.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any, Literal, TypeAlias

import datasets
import xxhash

from prefrl.errors import DataError, reason_of

DatasetKind = Literal["language_modeling", "prompt_only", "prompt_completion", "preference", "unpaired"]
Style = Literal["standard", "conversational"]
AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
Message = dict[str, Any]

# Keys under which a message may hold its thinking, other than as a block of its content.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Format:
    """What a dataset holds: its kind, its style, and the columns that are read as text or messages."""

    kind: DatasetKind
    columns: tuple[str, ...]
    style: Style
    from_value: tuple[str, ...] = ()  # columns whose messages are written as from/value


@dataclass(frozen=True)
class _Layout:
    kind: DatasetKind
    columns: tuple[str, ...]
    style: Style | None  # None: determined by the values

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns that hold text or messages."""
        return tuple(column for column in self.columns if column not in _OTHER_TYPES)


# Columns that hold neither text nor messages.
_OTHER_TYPES = {"label": "bool"}
_LAYOUTS = (
    _Layout("language_modeling", ("text",), "standard"),
    _Layout("language_modeling", ("messages",), "conversational"),
    _Layout("language_modeling", ("conversations",), "conversational"),
    _Layout("prompt_only", ("prompt",), None),
    _Layout("prompt_completion", ("prompt", "completion"), None),
    _Layout("preference", ("prompt", "chosen", "rejected"), None),
    _Layout("preference", ("chosen", "rejected"), None),
    _Layout("unpaired", ("prompt", "completion", "label"), None),
)

# Names that published datasets use for the columns that prefrl needs.
_SYNONYMS = {
    "text": ("content", "document", "body"),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "completion": ("answer", "response", "output", "solution"),
    "chosen": ("preferred", "accepted", "winner", "chosen_response"),
    "rejected": ("dispreferred", "refused", "loser", "rejected_response"),
    "label": ("is_desirable", "desirable", "thumbs_up", "is_correct"),
}
_FROM_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_VALUE_TYPES: dict[Style | None, str] = {
    "standard": "str",
    "conversational": "list of messages",
    None: "str | list of messages",
}
_NO_ROWS = "dataset has 0 rows: needs at least one. Check the split, the path and earlier filters"
# How many rows are searched for one that has a value in every column and so shows the style.
_ROWS_LOOKED_AT = 100
# A turn with one of these keys is not empty, even if its content is.
_CONTENT_SUBSTITUTES = ("tool_calls", *REASONING_FIELDS)


def detect_format(dataset: AnyDataset, kinds: Sequence[DatasetKind], *, text_field: str = "text") -> Format:
    """Detect the format of a dataset from its column names and from the values of its first row that has values.

    Args:
        dataset: Not empty. A stream is opened once, for its first rows.
        kinds: The kinds that the caller accepts.
        text_field: The column that holds the text of standard language modeling.
    Raises:
        DataError: Not a dataset, empty, a column is missing, the columns fit several formats, or a value of the first
            row is neither text nor messages.
    """
    _check_dataset(dataset)
    rows = iter(dataset)
    first = next(rows, None)
    if first is None:
        raise DataError(_NO_ROWS)
    names = dataset.column_names or list(first)
    layouts = [
        replace(layout, columns=(text_field,)) if layout.columns == ("text",) else layout
        for layout in _LAYOUTS
        if layout.kind in kinds
    ]
    fitting = [layout for layout in layouts if set(layout.columns) <= set(names)]
    if not fitting:
        raise DataError(_missing_columns_message(names, layouts))
    # prompt + completion also fits prompt alone: the layout with more columns is the intended one.
    largest = [a for a in fitting if not any(set(a.columns) < set(b.columns) for b in fitting)]
    if len(largest) > 1:
        raise DataError(
            f"columns {names} fit {len(largest)} formats: {_describe(largest)}. Remove the columns that are not "
            "needed: dataset.remove_columns([...])"
        )
    layout = largest[0]
    for index, row in enumerate(chain([first], islice(rows, _ROWS_LOOKED_AT - 1))):
        if all(row.get(column) for column in layout.texts):
            return _format_of_row(row, index, layout)
    return _format_of_row(first, 0, layout)


def get_dataset_column_names(dataset: AnyDataset) -> list[str]:
    """The columns of a dataset, or of its first row if it is a stream that does not know its columns."""
    names: list[str] = dataset.column_names or list(next(iter(dataset), {}))
    return names


def map_anew(
    dataset: AnyDataset, make: Callable[[Mapping[str, Any]], Any], name: str, column: str, **about: Any
) -> AnyDataset:
    """Add a column that a function of the user's makes, which is called in every run.

    `datasets` tells functions in modules apart by their names, so it would return what an earlier version has made.

    Args:
        dataset: A stream calls the function while it is read.
        make: The function, of a row.
        name: How messages call it.
        column: The column.
        about: Other arguments of `dataset.map`.

    Raises:
        DataError: The function raises; a stream raises while it is read.
    """

    def made(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            return {column: make(row)}
        except Exception as error:
            raise DataError(
                f"{name} raised {reason_of(error)}, for row {index} of the dataset. Correct it."
            ) from error

    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(made, with_indices=True, **about)
    rows = dataset.map(made, with_indices=True, load_from_cache_file=False, **about)
    if not len(rows):
        return rows
    digest = xxhash.xxh3_128(str(rows.features).encode())
    for batch in rows.data.to_batches():
        digest.update(batch.serialize())
    return datasets.Dataset(rows.data, info=rows.info, split=rows.split, fingerprint=digest.hexdigest())


def has_columns(dataset: AnyDataset, columns: Sequence[str]) -> bool:
    """Whether a dataset has all of these columns, and rows.

    Raises:
        DataError: Not a dataset, or it has the columns and no rows.
    """
    _check_dataset(dataset)
    if not set(columns) <= set(get_dataset_column_names(dataset)):
        return False
    if next(iter(dataset), None) is None:
        raise DataError(_NO_ROWS)
    return True


def check_not_reserved(dataset: AnyDataset, reserved: Sequence[str]) -> None:
    """Refuse a dataset that already has a column of the names that preparation adds.

    Raises:
        DataError: A reserved column is present.
    """
    names = get_dataset_column_names(dataset)
    taken = [name for name in reserved if name in names]
    if taken:
        raise DataError(
            f"column {taken[0]!r} is reserved: prefrl writes its token ids there. "
            f"Rename it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}'), or remove it"
        )


def convert_from_value(dataset: AnyDataset, dataset_format: Format) -> AnyDataset:
    """Turn `{"from": "human", "value": ...}` messages into `{"role": "user", "content": ...}`, if there are any."""
    if not dataset_format.from_value:
        return dataset
    about = {} if isinstance(dataset, datasets.IterableDataset) else {"desc": "Converting from/value messages"}
    return dataset.map(_convert_row, fn_kwargs={"columns": dataset_format.from_value}, **about)


def read_text(row: Mapping[str, Any], column: str) -> str:
    """The text of a cell.

    Raises:
        DataError: The value is not a non-empty string.
    """
    value = row.get(column)  # a row of a stream may lack it
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list):
        raise DataError(
            f"column {column!r} holds a list, but other rows or columns hold text: {_short(value)}. "
            "A dataset is either all text or all lists of messages"
        )
    raise DataError(f"column {column!r} is {value!r}: needs a non-empty str")


def read_messages(row: Mapping[str, Any], column: str, *, allow_empty: bool = False) -> list[Message]:
    """The messages of a cell, without the keys that Arrow filled with None.

    Args:
        row: A row of a dataset.
        column: The name of the cell's column.
        allow_empty: Whether the user's messages may be empty texts, because an environment adds to them.
    Raises:
        DataError: The value is not a non-empty list of messages with an allowed role and a content, or a message of a
            tool answers no call.
    """
    value = row.get(column)  # a row of a stream may lack it
    if isinstance(value, str):
        raise DataError(
            f"column {column!r} holds text, but other rows or columns hold lists of messages: {_short(value)}. "
            "A dataset is either all text or all lists of messages"
        )
    if not isinstance(value, list) or not value:
        raise DataError(f"column {column!r} is {value!r}: needs a non-empty list of messages")
    messages = [
        _read_message(message, f"column {column!r}, message {turn}", allow_empty) for turn, message in enumerate(value)
    ]
    _check_tool_turns(messages, column)
    return messages


def check_answered(messages: Sequence[Message], column: str) -> None:
    """Refuse a conversation in which the assistant says nothing, where it is learned from.

    Raises:
        DataError: No message has the role of the assistant.
    """
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"column {column!r} has no message with role 'assistant' to learn from: the roles of its messages "
            f"are {roles}. Add the answer, or drop the row"
        )


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row: a list of JSON schemas or its JSON text in column `tools`; None without any.

    Raises:
        DataError: The value is neither.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"column 'tools' is not valid JSON ({error}): {_short(tools)}") from error
    elif isinstance(tools, list):
        tools = _without_none(tools)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"column 'tools' is {_short(tools)}: needs a list of JSON schemas, or its JSON text")
    return tools


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, dict):
        raise DataError(
            f"{type(dataset).__name__}: must be one split, such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    if not isinstance(dataset, AnyDataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}: needs a datasets.Dataset or IterableDataset. "
            "From a list of dicts: datasets.Dataset.from_list(rows)"
        )


def _describe(layouts: Sequence[_Layout]) -> str:
    return " or ".join(
        f"{layout.kind} {{{', '.join(f'{name}: {_type_of(name, layout.style)}' for name in layout.columns)}}}"
        for layout in layouts
    )


def _type_of(column: str, style: Style | None) -> str:
    return _OTHER_TYPES.get(column, _VALUE_TYPES[style])


def _missing_columns_message(columns: Sequence[str], layouts: Sequence[_Layout]) -> str:
    near = {name: _nearest(name, columns) for layout in layouts for name in layout.columns if name not in columns}
    # The layout that was probably intended: the one with the fewest columns that no present column resembles.
    meant = min(layouts, key=lambda layout: sum(name in near and near[name] is None for name in layout.columns))
    missing = [name for name in meant.columns if name in near]
    hints = [
        f"did you mean {near[name]!r} for {name!r}? dataset.rename_column({near[name]!r}, {name!r}), or columns: "
        f"{{{name}: {near[name]}}} in the file of options"
        for name in missing
        if near[name] is not None
    ]
    absent = ", ".join(map(repr, missing))
    start = f"column {absent} is missing" if len(missing) == 1 else f"columns {absent} are missing"
    start = f"{start}; columns present: {list(columns)}"
    return "; ".join([start, *hints, f"expected {_describe(layouts)}"])


def _nearest(name: str, columns: Sequence[str]) -> str | None:
    by_lower_case = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name, by_lower_case, n=1, cutoff=0.7)
    close += [synonym for synonym in _SYNONYMS.get(name, ()) if synonym in by_lower_case]
    return by_lower_case[close[0]] if close else None


def _format_of_row(row: Mapping[str, Any], index: int, layout: _Layout) -> Format:
    styles = {column: _style_of(row.get(column), column, index) for column in layout.texts}
    if layout.kind == "preference" and styles.get("prompt") == "standard" and styles["chosen"] == "conversational":
        del styles["prompt"]
    columns = tuple(styles)
    style = layout.style or styles[columns[0]]
    for column, found in styles.items():
        if found != style:
            raise DataError(
                f"row {index}, column {column!r} holds {_VALUE_TYPES[found]}, expected {_VALUE_TYPES[style]}: "
                f"{_short(row[column])}. The columns {list(columns)} must be all text, or all lists of messages"
            )
    from_value: tuple[str, ...] = ()
    if style == "conversational":
        firsts = {column: {key for key, value in row[column][0].items() if value is not None} for column in columns}
        from_value = tuple(name for name, keys in firsts.items() if {"from", "value"} <= keys and "role" not in keys)
    return Format(kind=layout.kind, columns=columns, style=style, from_value=from_value)


def _style_of(value: object, column: str, index: int) -> Style:
    if isinstance(value, str) and value:
        return "standard"
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return "conversational"
    raise DataError(
        f"row {index}, column {column!r} is {_short(value)}: needs a non-empty str, "
        'or a list of messages like {"role": "user", "content": "..."}'
    )


def _convert_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    cells = {column: row.get(column) for column in columns}
    return {
        column: [convert_message(message) for message in cell] if isinstance(cell, list) else cell
        for column, cell in cells.items()
    }


def convert_message(message: object) -> object:
    """A message with the keys from/value as one with role/content; anything else as it is."""
    if not isinstance(message, dict) or not {"from", "value"} & message.keys():
        return message
    role = message.get("from")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _FROM_ROLES.get(role, role) if role else role, "content": message.get("value")} | others


def _read_message(message: object, where: str, allow_empty: bool) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_short(message)}: needs a dict with 'role' and 'content'")
    clean: Message = _without_none(message)
    if "role" not in clean and "from" in clean:
        raise DataError(
            f"{where} uses the keys from/value, unlike the first row: {_short(clean)}. Write all messages as "
            f'{{"role": ..., "content": ...}}'
        )
    role = clean.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(f"{where} has role {role!r}{hint}: allowed are {', '.join(ROLES)}")
    _check_content(clean, where, allow_empty)
    return clean


def _check_content(message: Message, where: str, allow_empty: bool) -> None:
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise DataError(f"{where} (role {message['role']!r}) has content {content!r}: needs a str")
    roles = ("system", "developer", "tool", "user") if allow_empty else ("system", "developer", "tool")
    may_be_empty = message["role"] in roles and content == ""
    if content or may_be_empty or any(message.get(key) for key in _CONTENT_SUBSTITUTES):
        return
    raise DataError(
        f"{where} (role {message['role']!r}) has "
        + ("empty content" if content == "" else f"no content, but the keys {sorted(message)}")
    )


def _check_tool_turns(messages: Sequence[Message], column: str) -> None:
    """Calls may stand in an assistant's text, so only the order of the roles can tell."""
    roles: list[str | None] = [None, *(message["role"] for message in messages)]
    for turn, (before, role) in enumerate(pairwise(roles)):
        if role == "tool" and before not in ("assistant", "tool"):
            place = "is the first message" if before is None else f"follows a message with role {before!r}"
            raise DataError(
                f"column {column!r}, message {turn} (role 'tool') does not answer a call: it {place}. It must follow "
                "the assistant's message with the call, or another tool message"
            )


def _without_none(value: Any) -> Any:
    # Arrow gives every dict the union of all keys and fills in None, which templates would print.
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
