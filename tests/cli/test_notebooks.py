"""The notebooks are those of the tutorials, and run from top to bottom."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from prefrl.scripts.main import main
from tests.cli.test_docs import IN_ORDER, ROOT, module

MAKER = module(ROOT / "docs/make_notebooks.py")


@pytest.mark.parametrize("page", MAKER.pages(), ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_tutorial(page: Path) -> None:
    """Else run `python docs/make_notebooks.py`."""
    assert MAKER.notebook_of(page).read_text(encoding="utf-8") == MAKER.notebook(page)


def test_each_notebook_has_a_tutorial() -> None:
    assert {MAKER.notebook_of(page) for page in MAKER.pages()} == {*MAKER.NOTEBOOKS.iterdir()}


def _run(command: str) -> None:
    """A command of a cell, in this process: starting one would cost the imports once more."""
    command, _, file = command.partition(" > ")
    words = shlex.split(command, comments=True)
    with contextlib.ExitStack() as stack:
        if file:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(file, "w"))))
        if words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            assert words[0] == "prefrl"
            assert main(words[1:]) == 0, command


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
    monkeypatch.setattr(shell, "system", _run)
    for cell in json.loads((MAKER.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = re.sub(r"(max_steps(?:=|: ))\d+", r"\g<1>2", "".join(cell["source"]))
            shell.run_cell(code).raise_error()
