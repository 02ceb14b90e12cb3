"""How the package is found after `pip install -e .`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Says where the package is found, without running it.
FIND = "from importlib.util import find_spec; print(find_spec('prefrl').origin)"


def found_from(folder: Path, *, path: Path) -> str:
    """Where a program that runs in `folder` finds prefrl, with `path` behind the folder on sys.path."""
    # -I and the inserts are what an interpreter without this test's settings has: the folder comes first.
    program = f"import sys; sys.path[:0] = ['', {str(path)!r}]; {FIND}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_clone_in_the_working_directory_does_not_hide_a_package_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "prefrl").symlink_to(ROOT)
    found = found_from(tmp_path, path=tmp_path / "prefrl")
    assert found == str(tmp_path / "prefrl" / "prefrl" / "__init__.py")


def test_an_editable_install_puts_the_folder_on_the_path() -> None:
    """Other back ends register a finder, which is asked after the working directory; hatchling does so if told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["build-system"]["build-backend"] == "hatchling.build"
    build = project["tool"]["hatch"]["build"]
    assert "dev-mode-exact" not in build
    assert build["targets"] == {"wheel": {"packages": ["prefrl"]}}


def test_the_version_of_the_installation_is_that_of_the_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    path = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("__version__ = ")]
    assert "version" in project["project"]["dynamic"]
