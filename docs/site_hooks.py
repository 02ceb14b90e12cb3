"""What mkdocs does to a page first: formulas become MathML, which browsers show without scripts or fonts.

A formula is a block ```math ... ```, as on GitHub, which renders the same block.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"^( *)```math\n(.*?)^ *```$", re.M | re.S)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its formulas as MathML."""
    return FORMULA.sub(lambda found: found[1] + convert(found[2].strip(), display="block"), markdown)
