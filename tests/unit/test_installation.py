"""How the package is found after `pip install -e .`, and with which versions of its dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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
    assert build["targets"]["wheel"] == {"packages": ["prefrl"]}


def test_the_version_of_the_installation_is_that_of_the_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    path = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("__version__ = ")]
    assert "version" in project["project"]["dynamic"]


# Extras that `make test-floors` does not install: an environment of its own, GPUs, what only tests ask with, or tools.
WITHOUT_FLOORS = {"vllm", "liger", "agent-clients", "docs", "bench", "dev"}


def pins(name: str) -> dict[str, Version]:
    """Version of each package in a file of constraints."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


INSTALLED = {canonicalize_name(package.name) for package in distributions()}


def lower_bounds() -> dict[str, Version]:
    """Lower bound of each dependency in pyproject.toml that `make test-floors` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert extras.keys() >= WITHOUT_FLOORS
    texts = [*project["dependencies"], *(text for name in extras.keys() - WITHOUT_FLOORS for text in extras[name])]
    requirements = [Requirement(text) for text in texts]
    return {
        canonicalize_name(requirement.name): Version(bound.version)
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    }


def test_the_floors_that_are_tested_are_those_of_the_project() -> None:
    tested = pins("constraints-floors.txt")
    assert lower_bounds() == {name: tested.get(name) for name in lower_bounds()}


def test_every_dependency_has_a_lower_bound_and_a_ceiling_above_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors, ceilings = lower_bounds(), pins("constraints.txt")
    assert {canonicalize_name(Requirement(text).name) for text in project["dependencies"]} <= floors.keys()
    assert {name for name, floor in floors.items() if floor > ceilings[name]} == set()


def test_every_package_that_an_installation_brings_is_pinned() -> None:
    """The dependencies of prefrl, those of its extras that are installed here, and theirs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found: set[tuple[str, str]] = set()
    left = [("prefrl", extra) for extra in ("", *extras.keys() - {"liger", "vllm", "bench"})]
    while left:
        name, extra = package = left.pop()
        if package in found or name not in INSTALLED:
            continue
        found.add(package)
        for need in map(Requirement, requires(name) or ()):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(need.name), wanted) for wanted in ("", *need.extras)]
    assert len(found) > 40
    names = {name for name, _ in found if not name.startswith(("nvidia-", "cuda-"))}  # torch pins these itself
    assert names - pins("constraints.txt").keys() <= {"prefrl", "setuptools", "triton"}


def test_make_installs_every_extra_whose_floor_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [installed] = re.findall(r"-c constraints-floors\.txt \\\n\s*-e '\.\[(.*)\]'", makefile)
    assert set(installed.split(",")) == project["optional-dependencies"].keys() - WITHOUT_FLOORS
