"""Programs as agents: a command line for each episode, with columns of the dataset's row as arguments."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prefrl.errors import ConfigError
from prefrl.options.names import check_known

if TYPE_CHECKING:
    from prefrl.rollout.gateway.formats import Client
    from prefrl.sandbox import Isolation
    from prefrl.sandbox.commands import Finished, Workplace

# What a command gets of the trainer's own environment variables, none of which is a secret.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_RUNNERS = frozenset({"python", "python3", "node", "ruby", "perl", *_SHELLS})


class Template:
    """A command line with columns. It is split into words once, and each word stays one argument.

    Args:
        text: As one writes it for a shell; there is none. `{column}` is what the column contains, `{{` is a brace.
        where: The option that has it, for messages.
        finds_files: Whether words that are files of the working directory mean these, wherever it is run.

    Raises:
        ConfigError: It cannot be read, its program is not found, or a shell would run what a column contains.
    """

    def __init__(self, text: str, where: str, *, finds_files: bool = False) -> None:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{where}={text!r}: {error}. Quote it as for a shell") from error
        if not words:
            raise ConfigError(f"{where}={text!r}: must be a program and its arguments")
        self.files = [os.path.abspath(word) for word in words[1:] if finds_files and Path(word).is_file()]
        words = [os.path.abspath(word) if finds_files and Path(word).is_file() else word for word in words]
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
        self.program = os.path.abspath(found)

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
        return [self.program, *words[1:]]


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


# What a command in a sandbox may use; those of `SandboxLimits` are for small tests.
LIMITS = {"wall_s": 60.0, "cpu_s": 600.0, "memory_mb": 4096, "processes": 64, "open_files": 1024, "scratch_mb": 256}


@dataclass(frozen=True, eq=False)
class CommandAgent:
    """A program that is started for each episode and asks the policy over a chat API, as an agent of a trainer.

    Its environment variables are `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`,
    which clients read, `PREFRL_SESSION`, an identifier of the episode, and `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR`
    and `TZ` as the trainer has them. What it writes to standard output is the result that reward functions read as
    `result`. An exit code other than 0 is a failure of the episode, as if an environment had raised an error.

    With any option but `command`, it runs in a sandbox, in a folder of its own that is gone afterwards: without other
    files of this machine than installed programs, and without another network than the gateway. `isolation="process"`
    limits neither.

    Args:
        command: The program and its arguments. Words are split as by a shell, but there is none. `{column}` stands for
            what a column of the dataset's row contains, and stays in its word; `{{` stands for a brace. In a sandbox,
            a word that is a file of the working directory means this file, wherever the folder is.
        files: Column with the files of the folder: contents by path, or an archive of tar or zip, or its path.
        tests: Command, or several by name, that are run in a sandbox of their own on what the agent has made of the
            folder. The reward is 1 if the exit code is 0, and 0 otherwise or after `wall_s` seconds.
        test_files: Column with files that are written to the folder before `tests`, over those of the agent.
        solution: Patterns of the files that the agent hands in, such as `src/*.py`. Tests see these as it left them,
            and all others as they were in `files`. Without patterns, they see its whole folder.
        isolation: See `prefrl.sandbox.LocalSandbox`.
        limits: Changes to what a command may use in a sandbox, which is `LIMITS`; see `SandboxLimits`. The time of the
            agent itself is that of the trainer's option `episode_timeout`.
        folders: Files and folders that can be read in the sandbox beside those of the system and of Python.

    Raises:
        ConfigError: A command cannot be read, or its program is not found; or an option lacks another one.
    """

    command: str
    files: str | None = None
    tests: str | Mapping[str, str] | None = None
    test_files: str | None = None
    solution: Sequence[str] = ()
    isolation: Isolation | None = None
    limits: Mapping[str, float] | None = None
    folders: Sequence[str] = ()
    _template: Template = field(init=False, repr=False)
    _tests: dict[str, Template] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.command, str):
            raise ConfigError(f"command={self.command!r}: must be a program and its arguments, as a text")
        if isinstance(self.solution, str):
            raise ConfigError(f"solution={self.solution!r}: must be a list of patterns. Write [{self.solution!r}]")
        tests = {"tests": self.tests} if isinstance(self.tests, str) else dict(self.tests or {})
        for name in ("test_files", "solution"):
            if getattr(self, name) and not tests:
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect without tests. Set tests")
        object.__setattr__(self, "_template", Template(self.command, "command", finds_files=self.is_in_sandbox))
        object.__setattr__(self, "_tests", {name: Template(text, "tests") for name, text in tests.items()})

    @property
    def __name__(self) -> str:
        return self._template.name

    @property
    def is_in_sandbox(self) -> bool:
        """Whether it runs in a sandbox."""
        return any((self.files, self.tests, self.isolation, self.limits, self.folders))

    @property
    def columns(self) -> set[str]:
        """The columns that it reads."""
        of_tests = (template.columns for template in self._tests.values())
        named = {name for name in (self.files, self.test_files) if name is not None}
        return self._template.columns.union(named, *of_tests)

    @property
    def has_reward(self) -> bool:
        """Whether it gives rewards itself."""
        return bool(self._tests)

    def setup(self) -> None:
        """Find out whether its sandbox works.

        Raises:
            ConfigError: It does not.
        """
        if self.is_in_sandbox:
            self._workplace.setup()

    @cached_property
    def _workplace(self) -> Workplace:
        from prefrl.sandbox import LocalSandbox, SandboxLimits  # few runs have one
        from prefrl.sandbox.commands import Workplace

        limits: dict[str, Any] = LIMITS | dict(self.limits or {})
        known = [one.name for one in fields(SandboxLimits)]
        for name in limits:
            check_known("limits", name, known, "limit")
        programs = [template.program for template in (self._template, *self._tests.values())]
        shown = (*self._template.files, *map(os.path.abspath, self.folders))
        return Workplace(LocalSandbox(self.isolation or "auto", SandboxLimits(**limits)), tuple(programs), shown)

    async def __call__(self, row: Mapping[str, Any], client: Client) -> str | float | dict[str, float]:
        """Run it for an episode.

        Returns:
            Its standard output, or the rewards of its tests.

        Raises:
            ValueError: A column is missing, or cannot be an argument or files.
            OSError: The program cannot be started, or ended with an exit code other than 0.
            OutputLimitError: It wrote too much.
            SandboxError: The sandbox does not start.
        """
        from prefrl.sandbox.commands import run_command  # --help does not wait for it

        if self.is_in_sandbox:
            return await self._in_sandbox(row, client)
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        finished = await run_command(self._template.filled(row), inherited | client.environment)
        return _checked(finished).output.decode(errors="replace")

    async def _in_sandbox(self, row: Mapping[str, Any], client: Client) -> str | float | dict[str, float]:
        from prefrl.sandbox.commands import archive_of, chosen

        address = urlsplit(client.root)
        server = (str(address.hostname), int(address.port or 80))
        inside = replace(client, root=f"http://127.0.0.1:{server[1]}")
        archives = [] if self.files is None else [archive_of(row[self.files])]
        words = self._template.filled(row)
        finished = _checked(await self._workplace.run(words, inside.environment, archives, server=server))
        if not self._tests:
            return finished.output.decode(errors="replace")
        archives = [*archives, chosen(finished.files, self.solution)] if self.solution else [finished.files]
        archives += [] if self.test_files is None else [archive_of(row[self.test_files])]
        rewards = {name: await self._passes(one.filled(row), archives) for name, one in self._tests.items()}
        return rewards["tests"] if isinstance(self.tests, str) else rewards

    async def _passes(self, command: Sequence[str], archives: Sequence[bytes]) -> float:
        from prefrl.sandbox.commands import OutputLimitError

        try:
            async with asyncio.timeout(self._workplace.sandbox.limits.wall_s):
                finished = await self._workplace.run(command, {}, archives)
        except (TimeoutError, OutputLimitError):
            return 0.0
        return float(finished.code == 0)


def _checked(finished: Finished) -> Finished:
    """The same, if it ended as it should.

    Raises:
        ChildProcessError: It did not.
    """
    if finished.code != 0:
        complaint = finished.complaint or "nothing on standard error"
        raise ChildProcessError(f"exit code {finished.code}: {complaint}")
    return finished
