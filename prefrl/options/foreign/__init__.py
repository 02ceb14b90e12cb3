"""What names of other libraries are here: for messages, guides and `prefrl migrate`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prefrl.options.foreign.axolotl import AXOLOTL
from prefrl.options.foreign.cosmos_rl import COSMOS_RL
from prefrl.options.foreign.ludwig import LUDWIG
from prefrl.options.foreign.others import OTHERS
from prefrl.options.foreign.row import Row
from prefrl.options.foreign.transformers import TRANSFORMERS
from prefrl.options.foreign.trl import ARGUMENTS, TRL
from prefrl.options.foreign.verl import VERL
from prefrl.options.foreign.verl_sft import VERL_SFT

__all__ = ["ARGUMENTS", "LIBRARIES", "Row", "advice", "row_of"]

# Names of verl and cosmos-rl are paths of keys. The first library that has a name is the one that is meant.
LIBRARIES: dict[str, Mapping[str, Row]] = {
    **{"TRL": TRL, "verl": VERL, "cosmos-rl": COSMOS_RL},
    **{"verl's SFT trainer": VERL_SFT, "Ludwig": LUDWIG, "axolotl": AXOLOTL},
    **{"transformers": TRANSFORMERS, "others": OTHERS},
}


def row_of(rows: Mapping[str, Row], name: str) -> Row | None:
    """The row of a name: its own, or that of a section that contains it.

    Args:
        rows: The names of a library.
        name: An option or a path of keys.
    """
    parts = name.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((rows[path] for path in paths if path in rows), None)


def advice(name: str, known: Collection[str]) -> str | None:
    """What to do about an unknown option that is another library's; None if it is no such name.

    Args:
        name: The unknown option, or only the last part of a path of keys. Dashes before it do not count.
        known: The options that there are where it was given.
    """
    name = name.lstrip("-").replace("-", "_")
    whole = [(library, [rows[name]]) for library, rows in LIBRARIES.items() if name in rows]
    parts = [
        (library, [row for path, row in rows.items() if path.endswith(f".{name}")])
        for library, rows in LIBRARIES.items()
    ]
    for library, found in [*whole, *parts]:
        texts = {row.says for row in found if not row.options or row.options[0] in known}
        if len(texts) == 1:
            whose = "" if library == "others" else f", an option of {library},"
            return f"{name!r}{whose} {texts.pop()}."
    return None
