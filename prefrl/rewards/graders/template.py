"""Texts with fields, into which prompts, completions and columns are inserted as data."""

from __future__ import annotations

import json
import keyword
import string
from collections.abc import Mapping, Sequence
from typing import Any

from prefrl.errors import ConfigError
from prefrl.rewards.base import completion_text, message_text

__all__ = ["Template", "check_column", "fill_rows", "joined_prompt"]

# Fields that are no columns.
_OWN_FIELDS = ("prompt", "completion")
# What rewards get besides columns, under names that are easily mistaken for fields.
_NO_FIELDS = {
    "prompts": "prompt",
    "completions": "completion",
    "completion_ids": "completion",
    "trainer_state": None,
    "log_metric": None,
    "log_extra": None,
    "self": None,
}


class Template:
    """A text with fields such as `{completion}`.

    What is inserted is never read as a template again, so braces in it mean nothing.

    Args:
        text: The text. `{{` and `}}` are braces.
        where: The grader and the parameter that it is, for messages.
        fields: All fields that it may have; None: `prompt`, `completion` and any column.
    Raises:
        ConfigError: A brace is not closed, or a field is not a name that can be filled.
    """

    def __init__(self, text: str, *, where: str, fields: Sequence[str] | None = None) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"{where}={text!r}: must be a text with fields such as {{completion}}")
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{where}={text!r}: {error}. Write {{{{ and }}}} for literal braces") from error
        for _, field, form, conversion in parsed:
            if field is not None:
                _check_field(field, bool(form or conversion), where, fields)
        self.text = text
        self._parts = [(literal, field) for literal, field, _, _ in parsed]
        self.fields = frozenset(field for _, field in self._parts if field is not None)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the dataset that it inserts."""
        return self.fields.difference(_OWN_FIELDS)

    @property
    def only_field(self) -> str | None:
        """The field, if the whole text is one field."""
        return self._parts[0][1] if len(self._parts) == 1 and not self._parts[0][0] else None

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with values for its fields."""
        return "".join(literal + (values[field] if field is not None else "") for literal, field in self._parts)


def _check_field(field: str, has_form: bool, where: str, fields: Sequence[str] | None) -> None:
    shown = f"{where}: {{{field}}}"
    if has_form or not field.isidentifier() or keyword.iskeyword(field):
        raise ConfigError(
            f"{shown} is not a field: allowed are the names of columns, without format, index or attribute. Write "
            "{{ and }} for literal braces"
        )
    if fields is not None and field not in fields:
        raise ConfigError(f"{shown} is not a field here: allowed are {', '.join(f'{{{name}}}' for name in fields)}")
    if fields is None:
        check_column(field, shown)


def check_column(field: str, shown: str) -> None:
    """Check that a name of one row's value is not that of another argument of rewards.

    Args:
        field: The name.
        shown: How it was written and where, for the message.
    Raises:
        ConfigError: It is one.
    """
    if field in _NO_FIELDS:
        meant = _NO_FIELDS[field]
        remedy = f"Did you mean {meant!r}?" if meant else "It is an argument of rewards that a grader cannot read"
        raise ConfigError(f"{shown} is not the value of a row. {remedy}")


def fill_rows(
    templates: Sequence[Template],
    prompts: Sequence[Any] | None,
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> list[Mapping[str, str] | None]:
    """For each of B rows the texts of the fields that templates have; None if one of their columns is None there."""
    names = frozenset[str]().union(*(template.columns for template in templates))
    rows: list[Mapping[str, str] | None] = []
    for i, completion in enumerate(completions):
        values = {name: columns[name][i] for name in names}
        if any(value is None for value in values.values()):
            rows.append(None)
            continue
        texts = {name: _text(value) for name, value in values.items()}
        prompt = "" if prompts is None else joined_prompt(prompts[i])
        rows.append({**texts, "prompt": prompt, "completion": completion_text(completion)})
    return rows


def joined_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt: of its message, or if there are several, each with its role in front."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return message_text(prompt[0])
    return "\n\n".join(f"{message.get('role')}: {message_text(message)}" for message in prompt)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
