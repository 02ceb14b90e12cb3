"""What makes a run the run that it is: everything that decides its updates."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefrl.errors import ConfigError
from prefrl.run.seal import write_synced

__all__ = ["IDENTITY", "Identity", "check_same_run", "new_run_id", "read_identity", "write_identity"]

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

    Args:
        saved: What was written.
        now: This run.
        where: The checkpoint, for the error.
        allowed: Names whose values may differ.

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
