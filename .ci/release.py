"""Whether a tag can be released: `python .ci/release.py v1.2.3`. It is the version, and the changelog has its date."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str) -> list[str]:
    """What has to be changed before this tag."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "prefrl/__init__.py").read_text(encoding="utf-8"), re.M)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and __version__ in prefrl/__init__.py is {version}: v{version} was expected")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M):
        found.append(f"CHANGELOG.md has no line `## {version} (YYYY-MM-DD)`")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff does not have version: {version}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1])) or None)
