"""What the command line and the YAML file of a run set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from prefrl.errors import PrefrlError

__all__ = ["Given"]

_E = TypeVar("_E", bound=PrefrlError)


@dataclass(frozen=True)
class Given:
    """What a user asked for.

    Args:
        values: The options that the command line or the file sets.
        places: Where those of the file stand, as file:line; also their entries, such as datasets[1].path.
        takes_rewards: Whether the algorithm learns from rewards.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]
    takes_rewards: bool

    def located(self, error: _E) -> _E:
        """The error with the line of the option that its message begins with, if the file sets it."""
        name = re.match(r"[\w.\[\]]*(?=[=:])", str(error))
        parts = re.findall(r"\w+|\.\w+|\[\d+\]", name[0]) if name else []
        names = ["".join(parts[:length]) for length in range(len(parts), 0, -1)]
        where = next((self.places[name] for name in names if name in self.places), None)
        return error if where is None else type(error)(f"{where}: {error}")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Inside this context, errors name the line of the option that their messages begin with."""
        try:
            yield
        except PrefrlError as error:
            located = self.located(error)
            if located is error:
                raise
            raise located from error
