"""Dataset formats: which columns a dataset may have, and what their values may be.

| kind | standard | conversational |
|---|---|---|
| language_modeling | `text`: str | `messages` (or `conversations`): list of messages |
| prompt_only | `prompt`: str | `prompt`: list of messages |
| prompt_completion | `prompt`, `completion`: str | `prompt`, `completion`: lists of messages |

A message is `{"role": ..., "content": ...}`; `{"from": ..., "value": ...}` is converted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import datasets

from prefrl.errors import DataError

__all__ = [
    "REASONING_FIELDS",
    "ROLES",
    "Format",
    "Kind",
    "Message",
    "Style",
    "check_not_reserved",
    "convert_from_value",
    "detect_format",
    "read_messages",
    "read_text",
    "read_tools",
]

Kind = Literal["language_modeling", "prompt_only", "prompt_completion"]
Style = Literal["standard", "conversational"]
Message = dict[str, Any]

# Names under which a message holds its thinking, besides a block in its content.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Format:
    """What a dataset holds: its kind, its style, and the columns that are read."""

    kind: Kind
    columns: tuple[str, ...]
    style: Style


@dataclass(frozen=True)
class _Layout:
    kind: Kind
    columns: tuple[str, ...]
    style: Style | None  # None: the values tell


_LAYOUTS = (
    _Layout("language_modeling", ("text",), "standard"),
    _Layout("language_modeling", ("messages",), "conversational"),
    _Layout("language_modeling", ("conversations",), "conversational"),
    _Layout("prompt_only", ("prompt",), None),
    _Layout("prompt_completion", ("prompt", "completion"), None),
)

# Names under which published datasets keep the column that we look for.
_SYNONYMS = {
    "text": ("content", "document", "body"),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "completion": ("answer", "response", "output", "solution"),
}
_FROM_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_VALUE_TYPES: dict[Style | None, str] = {
    "standard": "str",
    "conversational": "list of messages",
    None: "str | list of messages",
}
# A turn with one of these says something even if its content is empty.
_CONTENT_SUBSTITUTES = ("tool_calls", *REASONING_FIELDS)


def detect_format(dataset: datasets.Dataset, kinds: Sequence[Kind], *, text_field: str = "text") -> Format:
    """Tell a dataset's format from its column names and the values of its first row.

    Args:
        dataset: A non-empty map-style dataset.
        kinds: The kinds that the caller can use.
        text_field: The column that holds the text of standard language modelling.
    Raises:
        DataError: Not a `datasets.Dataset`, empty, a column is missing, the columns fit several formats, or a value of
            the first row is neither text nor messages.
    """
    _check_dataset(dataset)
    layouts = [_with_text_field(layout, text_field) for layout in _LAYOUTS if layout.kind in kinds]
    fitting = [layout for layout in layouts if set(layout.columns) <= set(dataset.column_names)]
    if not fitting:
        raise DataError(_missing_columns_message(dataset.column_names, layouts))
    # prompt + completion also fits prompt alone: the layout that uses more columns is meant.
    largest = [a for a in fitting if not any(set(a.columns) < set(b.columns) for b in fitting)]
    if len(largest) > 1:
        raise DataError(
            f"columns {dataset.column_names} fit {len(largest)} formats: {_describe(largest)}. "
            "Drop the columns that are not meant: dataset.remove_columns([...])"
        )
    return _format_of_first_row(dataset[0], largest[0])


def check_not_reserved(dataset: datasets.Dataset, reserved: Sequence[str]) -> None:
    """Refuse datasets that already have the columns that preparation adds.

    Raises:
        DataError: A reserved column is present.
    """
    taken = [name for name in reserved if name in dataset.column_names]
    if taken:
        raise DataError(
            f"column {taken[0]!r} is reserved: prefrl writes its token ids there. "
            f"Rename it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}'), or remove it"
        )


def convert_from_value(dataset: datasets.Dataset, dataset_format: Format) -> datasets.Dataset:
    """Turn `{"from": "human", "value": ...}` messages into `{"role": "user", "content": ...}`, if there are any.

    Args:
        dataset: A dataset of the format.
        dataset_format: As `detect_format` found it.
    """
    if dataset_format.style == "standard":
        return dataset
    first = dataset[0]
    columns = [column for column in dataset_format.columns if _is_from_value(first[column])]
    if not columns:
        return dataset
    return dataset.map(_convert_row, fn_kwargs={"columns": columns}, desc="Converting from/value messages")


def read_text(row: Mapping[str, Any], column: str) -> str:
    """The text of a cell.

    Raises:
        DataError: The value is not a non-empty string.
    """
    value = row[column]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list):
        raise DataError(
            f"column {column!r} holds a list, but other rows or columns hold text: {_short(value)}. "
            "A dataset is either all text or all lists of messages"
        )
    raise DataError(
        f"column {column!r} is {value!r}: needs a non-empty str. "
        f"Drop such rows: dataset.filter(lambda row: bool(row[{column!r}]))"
    )


def read_messages(row: Mapping[str, Any], column: str) -> list[Message]:
    """The messages of a cell, without the keys that Arrow filled with None.

    Raises:
        DataError: The value is not a non-empty list of messages with an allowed role and a content.
    """
    value = row[column]
    if isinstance(value, str):
        raise DataError(
            f"column {column!r} holds text, but other rows or columns hold lists of messages: {_short(value)}. "
            "A dataset is either all text or all lists of messages"
        )
    if not isinstance(value, list) or not value:
        raise DataError(
            f"column {column!r} is {value!r}: needs a non-empty list of messages. "
            f"Drop such rows: dataset.filter(lambda row: bool(row[{column!r}]))"
        )
    return [_read_message(message, f"column {column!r}, message {turn}") for turn, message in enumerate(value)]


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
    if isinstance(dataset, datasets.IterableDataset):
        raise DataError(
            "IterableDataset: streaming is not supported yet. Load a part of it as a Dataset: "
            "Dataset.from_list(list(dataset.take(n))), or load it with streaming=False"
        )
    if isinstance(dataset, dict):
        raise DataError(f"{type(dataset).__name__}: needs one split, as in dataset[{next(iter(dataset), 'train')!r}]")
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}: needs a datasets.Dataset. "
            "From a list of dicts: datasets.Dataset.from_list(rows)"
        )
    if len(dataset) == 0:
        raise DataError("dataset has 0 rows: needs at least one. Check the split, the path and earlier filters")


def _with_text_field(layout: _Layout, text_field: str) -> _Layout:
    return replace(layout, columns=(text_field,)) if layout.columns == ("text",) else layout


def _describe(layouts: Sequence[_Layout]) -> str:
    return " or ".join(
        f"{layout.kind} {{{', '.join(f'{column}: {_VALUE_TYPES[layout.style]}' for column in layout.columns)}}}"
        for layout in layouts
    )


def _missing_columns_message(columns: Sequence[str], layouts: Sequence[_Layout]) -> str:
    near = {name: _nearest(name, columns) for layout in layouts for name in layout.columns if name not in columns}
    # The layout that was probably meant: the one with fewest columns that nothing present resembles.
    meant = min(layouts, key=lambda layout: sum(name in near and near[name] is None for name in layout.columns))
    missing = [name for name in meant.columns if name in near]
    hints = [
        f"did you mean {near[name]!r} for {name!r}? dataset.rename_column({near[name]!r}, {name!r})"
        for name in missing
        if near[name] is not None
    ]
    start = f"column {', '.join(map(repr, missing))} is missing; columns present: {list(columns)}"
    return "; ".join([start, *hints, f"expected {_describe(layouts)}"])


def _nearest(name: str, columns: Sequence[str]) -> str | None:
    by_lower_case = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name, by_lower_case, n=1, cutoff=0.7)
    close += [synonym for synonym in _SYNONYMS.get(name, ()) if synonym in by_lower_case]
    return by_lower_case[close[0]] if close else None


def _format_of_first_row(row: Mapping[str, Any], layout: _Layout) -> Format:
    style = layout.style or _style_of(row[layout.columns[0]], layout.columns[0])
    for column in layout.columns:
        found = _style_of(row[column], column)
        if found != style:
            raise DataError(
                f"row 0, column {column!r} holds {_VALUE_TYPES[found]}, expected {_VALUE_TYPES[style]}: "
                f"{_short(row[column])}. All of {list(layout.columns)} are text, or all are lists of messages"
            )
    return Format(kind=layout.kind, columns=layout.columns, style=style)


def _style_of(value: object, column: str) -> Style:
    if isinstance(value, str) and value:
        return "standard"
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return "conversational"
    raise DataError(
        f"row 0, column {column!r} is {_short(value)}: needs a non-empty str, "
        'or a list of messages like {"role": "user", "content": "..."}'
    )


def _is_from_value(messages: object) -> bool:
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return False
    present = {key for key, value in messages[0].items() if value is not None}
    return {"from", "value"} <= present and "role" not in present


def _convert_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: [_convert_message(message) for message in row[column] or []] for column in columns}


def _convert_message(message: Mapping[str, Any]) -> Message:
    role = message.get("from")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _FROM_ROLES.get(role, role) if role else role, "content": message.get("value")} | others


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_short(message)}: needs a dict with 'role' and 'content'")
    clean: Message = _without_none(message)
    if "role" not in clean and "from" in clean:
        raise DataError(
            f"{where} is written as from/value while the first row is not: {_short(clean)}. "
            'Write all messages as {"role": ..., "content": ...}'
        )
    role = clean.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise DataError(f"{where} has role {role!r}{hint}: allowed are {', '.join(ROLES)}")
    _check_content(clean, where)
    return clean


def _check_content(message: Message, where: str) -> None:
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise DataError(f"{where} (role {message['role']!r}) has content {content!r}: needs a str")
    may_be_empty = message["role"] in ("system", "developer", "tool") and content == ""
    if content or may_be_empty or any(message.get(key) for key in _CONTENT_SUBSTITUTES):
        return
    raise DataError(
        f"{where} (role {message['role']!r}) has {'no content' if content is None else 'empty content'}: "
        f"needs text; keys present: {sorted(message)}. Correct or drop the row"
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
