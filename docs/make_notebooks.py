"""Write a notebook for each tutorial: `python docs/make_notebooks.py`.

Python code becomes cells, and lines of a shell begin with `!`. `%%writefile` writes a file of options, and code that
begins with the name of its file. A block `text` right after code is its output.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS / "notebooks"
BLOCK = re.compile(r"^(?:<!-- no-run: [^\n]+ -->\n)?```(python|bash|sh|yaml|text)\n(.*?)^```\n", re.M | re.S)
LINK = re.compile(r"\]\((?!https:)([^)#]+)")
START = """\
# Paths are those of a clone, whose notebooks are in docs/notebooks.
# Where there is none, as in Colab, the last release is installed and unpacked.
from pathlib import Path

if not Path("../../examples").exists():
    !pip download -q --no-deps --no-binary prefrl prefrl
    !pip install -q prefrl-*.tar.gz && tar xzf prefrl-*.tar.gz
    %cd -q {next(Path().glob("prefrl-*/docs/notebooks"))}
%cd ../.."""


def pages() -> list[Path]:
    """The tutorials."""
    return sorted((DOCS / "tutorials").glob("*.md"))


def notebook_of(page: Path) -> Path:
    """Where the notebook of a tutorial is."""
    return NOTEBOOKS / f"{page.stem}.ipynb"


def notebook(page: Path) -> str:
    """The notebook of a tutorial, as JSON."""
    cells: list[dict[str, Any]] = []
    for kind, text in [*_parts(page.read_text(encoding="utf-8"))]:
        if kind == "output":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}]
            continue
        name = {"id": f"cell-{len(cells)}", "metadata": {}}
        if kind == "markdown":
            cells.append({"cell_type": "markdown", **name, "source": _links(text, page).splitlines(True)})
            if len(cells) == 1:
                cells.append({**_code(START), "id": "cell-1"})
        else:
            cells.append({**_code(text), **name})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """Text, code and output in their order."""
    end, after_code = 0, False
    for found in BLOCK.finditer(page):
        language, text = found.groups()
        between = page[end : found.start()].strip()
        if language == "text":
            if not after_code or between:
                continue  # stays a part of the text
            yield "output", text
        else:
            if between:
                yield "markdown", between
            yield "code", _as_cell(language, text)
        end, after_code = found.end(), language != "text"
    if rest := page[end:].strip():
        yield "markdown", rest


def _as_cell(language: str, text: str) -> str:
    first = text.partition("\n")[0]
    if language == "yaml" or re.fullmatch(r"# \w+\.py", first):
        return f"%%writefile {first.split()[-1]}\n{text}"
    if language == "python":
        return text
    return re.sub(r"(?<!\\\n)^(?=[^# \n])", "!", text, flags=re.M).replace("!cd ", "%cd ")


def _code(text: str) -> dict[str, Any]:
    source = text.rstrip("\n").splitlines(True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}


def _links(text: str, page: Path) -> str:
    """The text with its links as they are from the folder of the notebooks."""
    return LINK.sub(lambda found: f"]({os.path.relpath(page.parent / found[1], NOTEBOOKS)}", text)


def main() -> None:
    """Rewrite every notebook."""
    for page in pages():
        notebook_of(page).write_text(notebook(page), encoding="utf-8")
        print(notebook_of(page))


if __name__ == "__main__":
    main()
