"""CONTRIBUTING.md names files, commands and contracts: whoever moves one finds it here."""

from __future__ import annotations

import re
import tomllib

from tests.private_names import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# The folders that the names of a table begin in.
FOLDERS = [".", "prefrl"]
FOLDERS += [f"prefrl/{room}" for room in ("trainer", "trainer/online", "trainer/features", "rollout", "scripts")]
# What commands make, and placeholders.
NOT_THERE = {"runs/demo/summary.json", "site/", "prefrl/trainer/features/<name>.py", "docs/trainers/<name>.md"}
NOT_THERE |= {"prefrl/trainer/<name>_trainer.py", "tests/unit/test_x.py"}


def named_files() -> list[str]:
    """What is in backticks, also as an argument of a command, and has a slash or the suffix of a file."""
    words = {word for code in re.findall(r"`([^`]+)`", PAGE) for word in code.split()}
    words = {word for word in words if re.fullmatch(r"[\w<>./-]+", word) and not word.startswith(".venv/")}
    return sorted(word for word in words if re.search(r"/|\.(py|md|json|yml|txt)$", word))


def test_each_file_that_the_page_names_is_there() -> None:
    paths = named_files()
    assert len(paths) > 100
    is_there = {path: any((ROOT / folder / path).exists() for folder in FOLDERS) for path in paths}
    assert [path for path in paths if not is_there[path] and path not in NOT_THERE] == []


def test_the_files_to_read_are_numbered_and_as_many_as_the_page_says() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\S+)` \|", PAGE, re.M)
    (count,) = re.findall(r"Read these (\d+) files", PAGE)
    assert [int(number) for number, _ in rows] == list(range(1, int(count) + 1))
    assert [path for _, path in rows if not (ROOT / "prefrl" / path).is_file()] == []


def test_each_command_that_the_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", PAGE)) <= targets
    modules = set(re.findall(r"python -m ([a-z_.]+)", PAGE)) - {"pytest"}
    paths = [ROOT / module.replace(".", "/") for module in modules]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


def test_each_contract_that_holds_a_ring_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = [contract["name"] for contract in project["tool"]["importlinter"]["contracts"]]
    rings = PAGE.partition("\n## Rings")[2].partition("\n\n| packages")[0]
    told = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", rings)
    assert len(told) > 5
    assert [one for one in told if not any(name.startswith(one) for name in names)] == []
