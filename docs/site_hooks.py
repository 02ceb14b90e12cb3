"""What mkdocs does to a page first: formulas become MathML, and notebooks can be opened in Colab.

A formula is a block ```math ... ```, as on GitHub, which renders the same block. Browsers show MathML without scripts
or fonts. Colab opens notebooks from GitHub, so that its links are only on a site for which PREFRL_REPOSITORY names the
address of a repository there, as for a release.
"""

from __future__ import annotations

import os
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"^( *)```math\n(.*?)^ *```$", re.M | re.S)
NOTEBOOK = re.compile(r"\[notebook\]\(\.\./notebooks/(\w+\.ipynb)\)")
GITHUB = "https://github.com/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its formulas as MathML, and with links to Colab."""
    markdown = FORMULA.sub(lambda found: found[1] + convert(found[2].strip(), display="block"), markdown)
    repository = os.environ.get("PREFRL_REPOSITORY", "").rstrip("/")
    if not repository.startswith(GITHUB):
        return markdown
    colab = f"https://colab.research.google.com/github/{repository.removeprefix(GITHUB)}/blob/main/docs/notebooks"
    return NOTEBOOK.sub(rf"\g<0> ([open it in Colab]({colab}/\1))", markdown)
