"""Options that say how the columns of a dataset become those that a trainer reads."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefrl.errors import ConfigError
from prefrl.options.fields import opt, parse_json

if TYPE_CHECKING:
    from prefrl.data.sources import RowShape

__all__ = ["SHAPING", "ColumnArguments", "ColumnNames", "check_columns", "shape_of"]

# The options of `ColumnArguments`, which are keys of a part of a mixture, too.
SHAPING = ("columns", "prompt_template", "system_prompt", "conversational")
_EXAMPLE = "Write {prompt: question}, the new name and then the dataset's own"


@dataclass(kw_only=True)
class ColumnArguments:
    """How the columns of a single dataset become prompts and messages.

    Raises:
        ConfigError: An option cannot be read.
    """

    columns: dict[str, str] | str | None = opt(
        None,
        "Columns to rename: {prompt: question} makes the dataset's question the prompt. The other columns are kept, "
        "and rewards can read them. JSON on the command line.",
    )
    prompt_template: str | None = opt(
        None,
        "Text of the prompt, with the dataset's columns in braces: 'Question: {question} Answer:'. Literal braces "
        "are doubled. In conversations, this is the user's message.",
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
        kept: The new names of the columns to keep; None: all are kept.
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
    """What the options, which `check_columns` has accepted, make of a dataset; None: they leave it as it is."""
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
