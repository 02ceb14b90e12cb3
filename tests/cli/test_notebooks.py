"""The notebooks are those of the tutorials, and run from top to bottom."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.cli.conftest import run_line
from tests.cli.test_docs import IN_ORDER, ROOT, module

MAKER = module(ROOT / "docs/make_notebooks.py")


@pytest.mark.parametrize("page", MAKER.pages(), ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_tutorial(page: Path) -> None:
    """Else run `python docs/make_notebooks.py`."""
    assert MAKER.notebook_of(page).read_text(encoding="utf-8") == MAKER.notebook(page)


def test_each_notebook_has_a_tutorial() -> None:
    assert {MAKER.notebook_of(page) for page in MAKER.pages()} == {*MAKER.NOTEBOOKS.iterdir()}


@pytest.mark.parametrize("name", IN_ORDER)
def test_cells_run_in_their_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps instead of all."""
    folder = tmp_path / "docs/notebooks"  # the first cell goes up from it
    folder.mkdir(parents=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "examples"), *sys.path])
    shell = InteractiveShell()
    monkeypatch.setattr(shell, "system", run_line)
    for cell in json.loads((MAKER.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = re.sub(r"(max_steps(?:=|: ))\d+", r"\g<1>2", "".join(cell["source"]))
            shell.run_cell(code).raise_error()
