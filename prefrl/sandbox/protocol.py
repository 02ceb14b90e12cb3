"""What a sandbox is: it runs a completion against a test and says whether it passed; one that is a server."""

from __future__ import annotations

import functools
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol
from urllib.parse import urlsplit

from prefrl.errors import ConfigError, RewardError
from prefrl.http import Http, HttpError, Overdue, Unreachable

# The marks of a fenced block by language.
LANGUAGES = {"python": frozenset({"python", "python3", "py"}), "bash": frozenset({"bash", "sh", "shell"})}


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a completion may use for one test.

    Args:
        wall_s: Wall-clock time limit in seconds.
        cpu_s: Limit of CPU time in seconds, for each process. It is rounded up.
        memory_mb: Limit of the address space in MiB, for each process.
        processes: Maximum number of processes and threads at the same time.
        open_files: Maximum number of open files, for each process.
        scratch_mb: Size limit in MiB for each file, or for all files together if the sandbox has a file system of its
            own.
        output_bytes: Maximum number of bytes of standard output. Exceeding it is a failure.

    Raises:
        ConfigError: A limit is not a positive, finite number.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    processes: int = 8
    open_files: int = 64
    scratch_mb: int = 16
    output_bytes: int = 2**20

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{limit.name}={value}: a limit of a sandbox needs to be > 0 and finite")


@dataclass(frozen=True, slots=True)
class InputOutputTest:
    """A program gets `input` on standard input, and must end with exit code 0 and `output` on standard output."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class AssertionTest:
    """Python code that uses the names of the completion and raises an exception if something is wrong."""

    code: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a test passed, and why not."""

    passed: bool
    reason: str = "passed"
    # What makes the test useless for any completion, and is seen without one. It is an error of the dataset.
    defect: str | None = None
    # What may be such a defect, or the fault of the completion.
    doubt: str | None = None


class SandboxError(RewardError):
    """The sandbox itself failed, and says nothing about the completion."""


class Sandbox(Protocol):
    """Runs completions against tests. Thread-safe."""

    def setup(self) -> None:
        """Find out whether it works.

        Raises:
            ConfigError: It does not; the message says what to do.
        """
        ...

    def check(self, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        """Run a completion against one test.

        Args:
            language: A key of `LANGUAGES`.
            code: The completion's code.
            test: The test.

        Raises:
            SandboxError: The sandbox failed.
        """
        ...


_KEY_VARIABLE = "PREFRL_SANDBOX_KEY"
# Seconds that an answer may take beyond the test itself: a queue, a container that starts.
_WAIT_S = 60.0
_PAUSES_S = (1.0, 4.0)
_MAX_ANSWER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class RemoteSandbox:
    """Sends each test to a server, which runs it and is trusted with the verdict.

    The request is a POST of `{"language": ..., "code": ..., "test": ..., "limits": ...}`, where the test is
    `{"input": ..., "output": ...}` or `{"code": ...}` and the limits are those of `SandboxLimits`. The answer is
    `{"passed": true}` or `{"passed": false, "reason": ...}`. If the environment variable PREFRL_SANDBOX_KEY is set, it
    is sent as a bearer token. A request is sent up to three times if the server cannot be reached or is too slow.

    Args:
        url: URL to send requests to, with http or https.
        limits: What a completion may use for one test.

    Raises:
        ConfigError: The URL is not valid.
    """

    url: str
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={self.url!r}: a remote sandbox needs a URL that starts with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(f"url: a key does not belong in the URL; set {_KEY_VARIABLE} in the environment")

    def setup(self) -> None:
        """Ask the server to run a program that passes a test and one that does not.

        Raises:
            ConfigError: The server does not answer, or gives a wrong answer.
        """
        test = InputOutputTest("prefrl", "prefrl")
        try:
            verdicts = [self.check("python", code, test).passed for code in ("print(input())", "raise SystemExit(1)")]
        except SandboxError as error:
            raise ConfigError(f"the sandbox server does not work: {error}") from error
        if verdicts != [True, False]:
            raise ConfigError(
                f"the sandbox server at {self.url} says {verdicts} about a program that passes and one that fails: "
                "allowed is [True, False]"
            )

    def check(self, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        """See `Sandbox.check`."""
        request = {"language": language, "code": code, "test": asdict(test), "limits": asdict(self.limits)}
        answer = self._ask(request)
        if not isinstance(answer, dict) or not isinstance(answer.get("passed"), bool):
            raise SandboxError(
                f"sandbox server {self.url}: answered {str(answer)[:200]!r}; allowed is an object with `passed`, true "
                "or false"
            )
        if answer["passed"]:
            return Verdict(True)
        return Verdict(False, str(answer.get("reason", "no reason given"))[:1000])

    def _ask(self, request: dict[str, Any]) -> Any:
        http = _client(os.environ.get(_KEY_VARIABLE), os.getpid())
        timeout = self.limits.wall_s + _WAIT_S
        for pause in (*_PAUSES_S, None):
            try:
                return http.request("POST", self.url, json=request, timeout=timeout, max_bytes=_MAX_ANSWER_BYTES)
            except HttpError as error:
                if pause is None or not isinstance(error, Unreachable | Overdue):
                    raise SandboxError(f"sandbox server: {error}") from error
                time.sleep(pause)
        raise AssertionError("unreachable")


@functools.cache
def _client(key: str | None, _process: int) -> Http:
    """The client of this process: its thread is not there after a fork."""
    return Http(key=key)
