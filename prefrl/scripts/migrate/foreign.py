"""What names of other libraries are here: for messages, guides and `prefrl migrate`.

`python -m prefrl.scripts.migrate.foreign` writes `foreign.json`, which messages about unknown options read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from prefrl.options.names import FOREIGN_FILE
from prefrl.scripts.migrate.cosmos_rl import COSMOS_RL
from prefrl.scripts.migrate.ludwig import LUDWIG
from prefrl.scripts.migrate.rows import AXOLOTL, OTHERS, Counterpart
from prefrl.scripts.migrate.trl_names import TRANSFORMERS, TRL
from prefrl.scripts.migrate.verl import VERL_SFT
from prefrl.scripts.migrate.verl_keys import VERL

# Names of verl and cosmos-rl are paths of keys. The first library that has a name is the one that is meant.
LIBRARIES: dict[str, Mapping[str, Counterpart]] = {
    **{"TRL": TRL, "verl": VERL, "cosmos-rl": COSMOS_RL},
    **{"verl's SFT trainer": VERL_SFT, "Ludwig": LUDWIG, "axolotl": AXOLOTL},
    **{"transformers": TRANSFORMERS, "others": OTHERS},
}


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


if __name__ == "__main__":
    FOREIGN_FILE.write_text(foreign_text(), encoding="utf-8")
