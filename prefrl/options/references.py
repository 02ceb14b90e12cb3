"""References such as `${trainer.project_name}`, which other libraries put into paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prefrl.errors import ConfigError

__all__ = ["check_references"]

_REFERENCE = re.compile(r"\$\{[^}]*\}?")


def check_references(paths: Mapping[str, Any]) -> None:
    """Refuse paths with references: they would be names of folders.

    Args:
        paths: Options by name; None, a text, or texts in lists and mappings.

    Raises:
        ConfigError: Names the option, its value and what to do.
    """
    for name, value in paths.items():
        if (found := _REFERENCE.search(str(value))) is not None:
            raise ConfigError(
                f"{name}={value!r}: the reference {found[0]} is not replaced by what it stands for. Write out the "
                "path."
            )
