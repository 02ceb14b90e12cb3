"""Text that is safe to show: a terminal takes no commands from it, and it contains no secrets."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# The `token` of a Hub is a secret, `pad_token` is not.
_SECRET = (
    r"(?:[a-z]+_)*(?:api_?key|authorization|passw(?:or)?d|secret)"
    r"|(?:(?:hub|push_to_hub|hf|(?:use_)?auth|access)_)?token"
)
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
# The user and password of a URL; tokens by their form; quoted values behind a secret's name, as in a printed mapping.
_LOGIN = re.compile(r"(?<=://)[^\s/'\"]+(?=@)")
_TOKEN = re.compile(r"\b(?:hf_|sk-)[\w-]{16,}|(?<=Bearer )[\w.~+/=-]{16,}")
_NAMED = re.compile(rf"(?<![\w-])({_SECRET})(['\"]?\s*[:=]\s*)(['\"])(?:(?!\3).)+\3", re.IGNORECASE)


def printable(text: str, *, max_characters: int | None = None, max_lines: int | None = None) -> str:
    r"""Text with control characters, invisible ones and those that change the direction of writing as `\x1b`.

    Line breaks and tabs are kept. The cost is that of the part that is kept, not that of the whole text.

    Args:
        text: Any text, such as a completion.
        max_characters: Characters after which it is cut off; None: no limit.
        max_lines: Lines after which it is cut off; None: no limit.

    Returns:
        The text; if it is cut off, the last line says so.
    """
    kept = text[:max_characters]
    if max_lines is not None:
        kept = "\n".join(kept.split("\n", max_lines)[:max_lines])
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in kept)
    return shown if len(kept) == len(text) else f"{shown}\n... ({len(text) - len(kept):,} more characters)"


def without_secrets(text: str) -> str:
    """Text with `***` for logins in URLs, tokens of a known form, and quoted values of names such as `password`."""
    text = _NAMED.sub(rf"\1\2\3{MASK}\3", text)
    return _TOKEN.sub(MASK, _LOGIN.sub(MASK, text))


def reason_of(error: BaseException) -> str:
    """An error of other code, for a message: its type and text in one line, without a full stop and secrets."""
    return printable(without_secrets(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")))


def masked(value: Any, name: str = "") -> Any:
    """An option's value as it may be logged: a copy, at any depth, with `***` for secrets.

    Args:
        value: The value. Only texts are changed.
        name: Its name, or the key under which a mapping has it. A text named `token` is a secret as a whole.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item, name) for item in value)
    if not isinstance(value, str):
        return value
    return MASK if value and _SECRET_NAME.fullmatch(name) else without_secrets(value)


def plain(value: Any) -> Any:
    """The value; a function, or another object that can be called, by its name, because its text has an address."""
    if not callable(value):
        return value
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
