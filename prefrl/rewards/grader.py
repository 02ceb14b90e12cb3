"""What graders have in common: a name, and a signature with the columns that they read."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection
from typing import Any, ClassVar

from prefrl.errors import ConfigError

__all__ = ["Grader", "check_name", "check_threshold", "passed"]


@dataclasses.dataclass(eq=False)
class Grader:
    """A reward that is configured by parameters. `__name__` is what logs call it."""

    # Parameters that decide how values are obtained, not which.
    _operational: ClassVar[frozenset[str]] = frozenset()

    def settings(self) -> dict[str, Any]:
        """Its parameters, which decide its values."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in self._operational]
        return {name: getattr(self, name) for name in names}

    def _declare(
        self, name: str, required: Collection[str], optional: Collection[str] = (), *, reads_all: bool = False
    ) -> None:
        """Set the name, and the signature by which a runner knows what to pass.

        Args:
            name: The grader's name.
            required: Arguments without default, such as columns.
            optional: Arguments with a default.
            reads_all: Whether it reads all other columns, too.
        """
        self.__name__ = check_name(name)
        parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in sorted(required)]
        parameters += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in optional]
        if reads_all:
            parameters.append(inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD))
        self.__signature__ = inspect.Signature(parameters)


def check_name(name: str) -> str:
    """The name of a grader.

    Raises:
        ConfigError: It is empty or has a slash, which separates the parts of a metric's name.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"name={name!r}: the name of a grader must be a text without '/'")
    return name


def check_threshold(who: str, parameter: str, value: float | None) -> None:
    """Check that a threshold is a number, or None.

    Raises:
        ConfigError: It is something else.
    """
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ):
        raise ConfigError(f"grader {who!r}: {parameter}={value!r}: must be a finite number or None")


def passed(value: float, threshold: float | None) -> float:
    """The value; with a threshold: 1 if it is reached, else 0."""
    return value if threshold is None else float(value >= threshold)
