"""Writes `foreign.json`, which messages about unknown options read: `python -m prefrl.scripts.migrate.foreign`."""

from __future__ import annotations

from prefrl.options.names import FOREIGN_FILE
from prefrl.scripts.migrate.foreign import foreign_text

FOREIGN_FILE.write_text(foreign_text(), encoding="utf-8")
