"""Calls rewards that harm the process that they run in, each in a fork of this one; see test_guard."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefrl.errors import RewardError
from prefrl.rewards import RewardRunner, confinement
from tests.patience import PATIENCE, before_a_deadline


def holds_the_lock(completions: list[str]) -> list[float]:
    return [float(re.match(r"(a+)+$", "a" * 60 + "b") is not None) for _ in completions]


async def holds_the_lock_later(completions: list[str]) -> list[float]:
    return holds_the_lock(completions)


def leaves_as_a_success(completions: list[str]) -> list[float]:
    os._exit(0)


def crashes(completions: list[str]) -> list[float]:
    ctypes.string_at(0)
    return [0.0]


def forks(completions: list[str]) -> list[float]:
    """Its value is the exit code of the child, which comes back."""
    child = os.fork()
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else 0.0]


async def forks_later(completions: list[str]) -> list[float]:
    return forks(completions)


def has_a_child_that_leaves(completions: list[str]) -> list[float]:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]


CASES: list[Callable[..., Any]] = [
    holds_the_lock,
    holds_the_lock_later,
    leaves_as_a_success,
    crashes,
    forks,
    forks_later,
    has_a_child_that_leaves,
]


def _run(reward: Callable[..., Any], timeout: float) -> int:
    signal.alarm(120)  # its default action needs no interpreter lock
    try:
        scores = RewardRunner(reward, timeout=timeout).score(["p"], ["c"], [[1]], {})
    except RewardError as error:
        print(error, flush=True)
        return 2
    print(f"value {scores.by_name[reward.__name__]}", flush=True)
    return 0


def main() -> None:
    """Write what each case prints into a folder, and print the exit codes."""
    confinement._GRACE_S = 0.5
    folder = Path(sys.argv[1])
    codes = {reward.__name__: _end_of(reward, folder / reward.__name__) for reward in CASES}
    print(json.dumps(codes))


def _end_of(reward: Callable[..., Any], path: Path) -> int:
    if "holds" not in reward.__name__:
        return _in_a_fork(reward, path, PATIENCE)

    def attempt(seconds: float) -> int | None:
        code = _in_a_fork(reward, path, seconds)
        return code if "in holds_the_lock" in path.read_text() else None  # its deadline came before it

    return before_a_deadline(attempt)


def _in_a_fork(reward: Callable[..., Any], path: Path, timeout: float) -> int:
    child = os.fork()
    if child == 0:
        output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(_run(reward, timeout))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
