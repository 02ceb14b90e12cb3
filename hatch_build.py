"""What the package says of itself and pyproject.toml does not know: where the repository is.

Releases set PREFRL_REPOSITORY to the address of their repository, which may be a fork. The package's page then has
links to it, and the relative links and pictures of the README lead to the files of the released version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURES = (".svg", ".png")


class Addresses(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the fields in."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("PREFRL_REPOSITORY", "").rstrip("/")
        if repository:
            metadata["urls"] = urls(repository)
            text = with_addresses(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(repository: str) -> dict[str, str]:
    """The links of the package's page."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_addresses(text: str, repository: str, tag: str) -> str:
    """Markdown whose relative links lead to the files of a tag."""

    def absolute(found: re.Match[str]) -> str:
        target = found[1]
        kind = "raw" if target.endswith(PICTURES) else "blob"
        return f"]({repository}/{kind}/{tag}/{target})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, text)
