"""What started a run: a line of `starts.jsonl` for every start, with the command, the versions and the machine."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefrl.printable import masked

__all__ = ["STARTS", "Start", "read_starts", "record_start"]

STARTS = "starts.jsonl"
_PACKAGES = ("prefrl", "torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "vllm")


@dataclass(frozen=True)
class Start:
    """A start of training, from step 0 or from a checkpoint."""

    run: str  # id of the run
    time: str  # ISO 8601, UTC
    command: str  # as a shell takes it, without secrets
    versions: dict[str, str]  # of Python and the packages that are installed
    platform: str


def record_start(folder: Path, run: str) -> None:
    """Add a line to `starts.jsonl`.

    Args:
        folder: `output_dir`.
        run: Id of the run.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    start = Start(run, now, command_of(sys.orig_argv), _versions(), f"{platform.system()} {platform.machine()}")
    with (folder / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def read_starts(folder: Path, run: str) -> list[Start]:
    """The starts of a run, in their order; those of other runs in the folder and damaged lines are left out."""
    try:
        lines = (folder / STARTS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    starts = []
    for line in lines:
        try:
            starts.append(Start(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # the last line of a killed process
    return [start for start in starts if start.run == run]


def command_of(argv: Sequence[str]) -> str:
    """A command line as a shell takes it, with `***` for secrets and without the folders of the programs.

    Args:
        argv: The words with which the process was started, the program first.
    """
    words = [Path(argv[0]).name, *argv[1:]] if argv else []
    if len(words) > 1 and Path(words[1]).name == "prefrl":
        words = ["prefrl", *words[2:]]
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if equals and word.startswith("-"):
            shown.append(f"{option}={masked(value, _name(option))}")
        else:
            shown.append(masked(word, _name(before)) if before.startswith("-") else masked(word))
    return shlex.join(shown)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
