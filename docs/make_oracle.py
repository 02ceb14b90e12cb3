"""Write the oracle's tables of the docs from exact sums: `python docs/make_oracle.py`, some seconds.

A page says where with a pair of markers, `<!-- oracle: policy -->` and `<!-- end of oracle -->`. What stands between
them is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

from prefrl.scripts.oracle.tables import EPSILON_HIGH, HYPERPARAMETERS, TABLES

PAGES = [Path(__file__).parent / name for name in ("oracle.md", "losses.md")]
MARKERS = re.compile(r"(<!-- oracle: (\w+) -->\n).*?(<!-- end of oracle -->)", re.S)


def render(page: str) -> str:
    """The page with its tables as they should be."""
    return MARKERS.sub(lambda found: f"{found[1]}\n{content(found[2])}\n\n{found[3]}", page)


def content(name: str) -> str:
    """A table, or the hyperparameters that are not at their defaults."""
    if name == "hyperparameters":
        changed = [
            f"`{name}`: {', '.join(f'`{k}={v}`' for k, v in keys.items())}" for name, keys in HYPERPARAMETERS.items()
        ]
        return f"`epsilon_high={EPSILON_HIGH}` for losses that have it; {'; '.join(changed)}; defaults otherwise."
    return TABLES[name].markdown()


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
