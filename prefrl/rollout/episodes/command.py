"""Programs as agents: a command line for each episode, with columns of the dataset's row as arguments."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefrl.errors import ConfigError

if TYPE_CHECKING:
    from prefrl.rollout.gateway.server import Client
    from prefrl.sandbox.commands import Finished

# What a command gets of the trainer's own environment variables, none of which is a secret.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_RUNNERS = frozenset({"python", "python3", "node", "ruby", "perl", *_SHELLS})


class Template:
    """A command line with columns. It is split into words once, and each word stays one argument.

    Args:
        text: As one writes it for a shell; there is none. `{column}` is what the column contains, `{{` is a brace.
        where: The option that has it, for messages.

    Raises:
        ConfigError: It cannot be read, its program is not found, or a shell would run what a column contains.
    """

    def __init__(self, text: str, where: str) -> None:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{where}={text!r}: {error}. Quote it as for a shell") from error
        if not words:
            raise ConfigError(f"{where}={text!r}: must be a program and its arguments")
        self._words = [_parts(word, where, text) for word in words]
        self.columns = {column for parts in self._words for _, column in parts if column is not None}
        if any(column is not None for _, column in self._words[0]):
            raise ConfigError(f"{where}={text!r}: the program must not be a column, but its arguments may be columns")
        named = (one for one in words if one[0:1] not in ("-", "{") and Path(one).name not in _RUNNERS)
        self.name = Path(next(named, words[0])).stem
        self._check_shell(Path(words[0]).name, where, text)
        found = shutil.which(words[0])
        if found is None:
            remedy = f"Write ./{words[0]}" if Path(words[0]).is_file() else "Install it, or write its whole path"
            raise ConfigError(f"{where}={text!r}: the program {words[0]!r} is not found. {remedy}")
        self._program = os.path.abspath(found)

    def _check_shell(self, program: str, where: str, text: str) -> None:
        """Refuse columns in the code of a shell, which would run what they contain."""
        for flag, code in zip(self._words[1:], self._words[2:], strict=False):
            is_code = program in _SHELLS and flag[0][0].startswith("-") and flag[0][0].endswith("c")
            inside = [column for _, column in code if column is not None]
            if is_code and inside:
                raise ConfigError(
                    f"{where}={text!r}: the shell would run what the column {inside[0]!r} contains. Give it as an "
                    f"argument of the code: {program} -c 'my-agent \"$1\"' {program} {{{inside[0]}}}"
                )

    def filled(self, row: Mapping[str, Any]) -> list[str]:
        """The path of the program and its arguments.

        Raises:
            ValueError: A column is missing, or its content cannot be an argument.
        """
        words = ["".join(text + _value(row, column) for text, column in parts) for parts in self._words]
        return [self._program, *words[1:]]


def _parts(word: str, where: str, text: str) -> list[tuple[str, str | None]]:
    """Texts, each with the column after it."""
    try:
        found = list(string.Formatter().parse(word))
    except ValueError as error:
        raise ConfigError(f"{where}={text!r}: {error}. Write {{{{ and }}}} for braces") from error
    for _, column, spec, conversion in found:
        if column is not None and (not column or spec or conversion):
            raise ConfigError(
                f"{where}={text!r}: a column is written as {{column}}. Write {{{{ and }}}} for braces, also in JSON"
            )
    return [(before, column) for before, column, _, _ in found] or [("", None)]


def _value(row: Mapping[str, Any], column: str | None) -> str:
    """What a column contains, as text: that of a single message is its content, and other data is JSON."""
    if column is None:
        return ""
    value = row.get(column)
    if value is None:
        raise ValueError(f"the row has nothing in the column {column!r}")
    if isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content", value)
    text = value if isinstance(value, str) else json.dumps(value)
    if "\0" in text:
        raise ValueError(f"the column {column!r} has a null character, which no argument can have")
    return text


@dataclass(frozen=True, eq=False)
class CommandAgent:
    """A program that is started for each episode and asks the policy over a chat API, as an agent of a trainer.

    Its environment variables are `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`,
    which clients read, `PREFRL_SESSION`, an identifier of the episode, and `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR`
    and `TZ` as the trainer has them. What it writes to standard output is the result that reward functions read as
    `result`. An exit code other than 0 is a failure of the episode, as if an environment had raised an error.

    Args:
        command: The program and its arguments. Words are split as by a shell, but there is none. `{column}` stands for
            what a column of the dataset's row contains, and stays in its word; `{{` stands for a brace.

    Raises:
        ConfigError: The command cannot be read, or its program is not found.
    """

    command: str
    _template: Template = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", Template(self.command, "command"))

    @property
    def __name__(self) -> str:
        return self._template.name

    @property
    def columns(self) -> set[str]:
        """The columns that it reads."""
        return self._template.columns

    @property
    def has_reward(self) -> bool:
        """Whether it gives rewards itself."""
        return False

    async def __call__(self, row: Mapping[str, Any], client: Client) -> str:
        """Run it for an episode.

        Raises:
            ValueError: A column is missing, or cannot be an argument.
            OSError: The program cannot be started, or ended with an exit code other than 0.
            OutputLimitError: It wrote too much.
        """
        from prefrl.sandbox.commands import run_command  # --help does not wait for it

        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        finished = await run_command(self._template.filled(row), inherited | client.environment)
        return _checked(finished).output.decode(errors="replace")


def _checked(finished: Finished) -> Finished:
    if finished.code != 0:
        complaint = finished.complaint or "nothing on standard error"
        raise ChildProcessError(f"exit code {finished.code}: {complaint}")
    return finished
