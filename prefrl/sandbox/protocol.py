"""What a sandbox is: it runs a completion against a test and says whether it passed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from prefrl.errors import ConfigError, RewardError

__all__ = ["LANGUAGES", "AssertionTest", "InputOutputTest", "Sandbox", "SandboxError", "SandboxLimits", "Verdict"]

# The marks of a fenced block by language.
LANGUAGES = {"python": frozenset({"python", "python3", "py"}), "bash": frozenset({"bash", "sh", "shell"})}


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a completion may use for one test.

    Args:
        wall_s: Seconds by the clock.
        cpu_s: CPU seconds of each process; rounded up.
        memory_mb: MiB of address space of each process.
        processes: Processes and threads at a time.
        open_files: Open files of each process.
        scratch_mb: MiB of a file, and where the sandbox has a file system of its own, of all files.
        output_bytes: Bytes of standard output. More are a failure.

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
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field.name}={value}: a limit of a sandbox needs to be > 0 and finite")


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
