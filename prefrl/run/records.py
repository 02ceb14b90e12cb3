"""What a run writes down about itself, for itself and others: what decides its updates, its starts and its metrics."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError, masked
from prefrl.run.checkpoints import write_synced

IDENTITY = "run.json"


@dataclass(frozen=True)
class Identity:
    """A run: which parts of what decides its updates have which value."""

    run: str  # id of the run
    # JSON values by name: "algorithm", "model", "data", "rewards", and the options that decide the updates.
    decisive: Mapping[str, Any]
    model: str = ""  # name or path of the model that it began with; empty: an instance that has none
    sizes: Mapping[str, int] = field(default_factory=dict)  # those that were "auto", once they are found


def new_run_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(6)


def write_identity(folder: Path, identity: Identity) -> None:
    """Write `run.json`, in place of the one that is there; a kill leaves one of the two."""
    aside = folder / f"{IDENTITY}.part"
    aside.unlink(missing_ok=True)  # it could be a link
    write_synced(aside, json.dumps(asdict(identity), indent=1, sort_keys=True))
    os.replace(aside, folder / IDENTITY)


def read_identity(folder: Path) -> Identity | None:
    """Read `run.json`; None if there is none that can be read."""
    try:
        values = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
        return Identity(values["run"], dict(values["decisive"]), values["model"], dict(values["sizes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_same_run(saved: Identity, now: Identity, *, where: str, allowed: Collection[str]) -> list[str]:
    """Check that what decides the updates is what it was when a checkpoint was written.

    Returns:
        The names that are allowed to differ and do.

    Raises:
        ConfigError: Lists every other difference.
    """
    after = json.loads(json.dumps(now.decisive))  # as it would be read
    names = [name for name in sorted({*saved.decisive, *after}) if saved.decisive.get(name) != after.get(name)]
    refused = [name for name in names if name not in allowed]
    if refused:
        lines = "".join(f"\n  {name}: {_difference(saved.decisive.get(name), after.get(name))}" for name in refused)
        raise ConfigError(
            f"{where} belongs to a run with other settings, which decide the updates:{lines}\nResume with the same "
            f"settings, or set allow_resume_changes={refused!r} to continue with the new ones, or start a new run "
            f"from its weights, model={where!r}."
        )
    return names


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        return ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in keys)
    return f"was {before!r} and is {after!r}"


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
    """Add a line to `starts.jsonl`."""
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


METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a line. NaN and infinity, which JSON does not have, become null.

    Args:
        folder: The folder of the run.
        row: `run` (its id), `step`, `time` (seconds since 1970) and the metrics by name.

    Raises:
        OSError: The file cannot be written.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of the last run in a folder, in order.

    A run that was interrupted and resumed repeats the steps after its checkpoint; their earlier rows are left out, and
    so is a line that was cut off by a crash.

    Raises:
        OSError: There is no file, or it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not {"run", "step"} <= row.keys():
            continue  # of another program
        if rows and row["run"] != rows[-1]["run"]:
            rows = []
        # A step is logged once with its loss; evaluations of the same step follow.
        first_repeated = row["step"] if "loss" in row else row["step"] + 1
        while rows and rows[-1]["step"] >= first_repeated:
            rows.pop()
        rows.append(row)
    return rows
