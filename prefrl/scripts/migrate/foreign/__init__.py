"""What names of other libraries are here: for messages, guides and `prefrl migrate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from prefrl.scripts.migrate.foreign.cosmos_rl import COSMOS_RL
from prefrl.scripts.migrate.foreign.ludwig import LUDWIG
from prefrl.scripts.migrate.foreign.others import AXOLOTL, OTHERS
from prefrl.scripts.migrate.foreign.row import Counterpart
from prefrl.scripts.migrate.foreign.trl import TRANSFORMERS, TRL
from prefrl.scripts.migrate.foreign.verl import VERL
from prefrl.scripts.migrate.foreign.verl_sft import VERL_SFT

__all__ = ["LIBRARIES", "Counterpart", "foreign_text", "row_of"]

# Names of verl and cosmos-rl are paths of keys. The first library that has a name is the one that is meant.
LIBRARIES: dict[str, Mapping[str, Counterpart]] = {
    **{"TRL": TRL, "verl": VERL, "cosmos-rl": COSMOS_RL},
    **{"verl's SFT trainer": VERL_SFT, "Ludwig": LUDWIG, "axolotl": AXOLOTL},
    **{"transformers": TRANSFORMERS, "others": OTHERS},
}


def row_of(rows: Mapping[str, Counterpart], name: str) -> Counterpart | None:
    """The row of a name: its own, or that of a section that contains it.

    Args:
        rows: The names of a library.
        name: An option or a path of keys.
    """
    parts = name.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((rows[path] for path in paths if path in rows), None)


def foreign_text() -> str:
    """The content of `foreign.json`: what `prefrl.options.names` reads of the tables, a line for each name."""
    libraries = [
        (library, _object((name, _told(row)) for name, row in rows.items())) for library, rows in LIBRARIES.items()
    ]
    return _object(libraries) + "\n"


def _told(row: Counterpart) -> str:
    return json.dumps([row.options[0] if row.options else "", row.says])


def _object(items: Iterable[tuple[str, str]]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in items) + "\n}"
