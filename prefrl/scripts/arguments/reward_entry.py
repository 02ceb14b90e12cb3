"""An entry of `reward_funcs`: a name, or a mapping of a name and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prefrl.errors import ConfigError

__all__ = ["RewardEntry", "check_reward_files", "reward_entries"]


class RewardEntry(str):
    """A reward as one writes it on the command line: `name`, or `name(parameter=value)`.

    Args:
        entry: This text; or a mapping with the key `name`, whose other keys are parameters.
        where: The option that has it, for messages.

    Raises:
        ConfigError: It is neither.
    """

    __slots__ = ()

    def __new__(cls, entry: str | Mapping[str, Any], where: str = "reward_funcs") -> Self:
        """Write a mapping as text."""
        if isinstance(entry, str):
            return super().__new__(cls, entry)
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or "(" in name:
            raise ConfigError(f"{where}={entry!r}: must be a name, or a mapping such as {{name: f, tolerance: 0.1}}")
        parameters = {key: value for key, value in entry.items() if key != "name"}
        for key in parameters:
            if not str(key).isidentifier():
                raise ConfigError(f"{where}={entry!r}: {key!r} is not the name of a parameter")
        text = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        return super().__new__(cls, f"{name}({text})" if parameters else name)


def reward_entries(entries: Sequence[str | Mapping[str, Any]] | None) -> list[RewardEntry] | None:
    """The entries of the option `reward_funcs`.

    Raises:
        ConfigError: One is neither a name nor a mapping with a name.
    """
    if entries is None:
        return None
    return [RewardEntry(entry, f"reward_funcs[{i}]") for i, entry in enumerate(entries)]


def check_reward_files(entries: Sequence[str]) -> None:
    """Refuse rewards in files that are not there; files are not run.

    Args:
        entries: Of the option `reward_funcs`.

    Raises:
        ConfigError: A file is missing.
    """
    for number, entry in enumerate(entries):
        place = entry.partition("(")[0].rpartition(":")[0]
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"reward_funcs[{number}]={str(entry)!r}: there is no file {place!r}")
