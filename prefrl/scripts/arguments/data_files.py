"""What can be seen of a file of data before it is read, and why it could not be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

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
