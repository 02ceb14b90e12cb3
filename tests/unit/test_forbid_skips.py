"""Continuous integration runs with --forbid-skips, so that a skipped test is not mistaken for one that passed.

A test that ends the process that runs it is a failure, and no reason to wait forever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
PASSES = "def test_a():\n    pass\n"
CASES = {
    "mark": "import pytest\n@pytest.mark.skip(reason='no reason')\ndef test_b():\n    pass\n",
    "call": "import pytest\ndef test_b():\n    pytest.skip('no reason')\n",
    "module": "import pytest\npytest.importorskip('no_such_module')\ndef test_b():\n    pass\n",
}


def run(folder: Path, *options: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "tests.conftest"]
    command += ["-p", "xdist", str(folder), *options]
    # Plugins of other packages take longer to import than all else here.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_every_kind_of_skip_is_a_failure_if_skips_are_forbidden(workers: list[str], tmp_path: Path) -> None:
    for kind, code in CASES.items():
        (tmp_path / f"test_{kind}.py").write_text(code, encoding="utf-8")
    (tmp_path / "test_other.py").write_text(PASSES, encoding="utf-8")
    done = run(tmp_path, *workers, "--forbid-skips", "--continue-on-collection-errors")
    assert done.returncode != 0
    assert "1 failed, 1 passed, 2 errors" in done.stdout
    assert done.stdout.count("but --forbid-skips is on: ") >= len(CASES)


def test_a_skip_is_a_skip_otherwise(tmp_path: Path) -> None:
    (tmp_path / "test_mark.py").write_text(CASES["mark"], encoding="utf-8")
    assert "1 skipped" in run(tmp_path).stdout


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_test_that_ends_its_worker_fails_once_and_the_others_are_run(name: str, tmp_path: Path) -> None:
    for other in ("a", "b", "c"):
        (tmp_path / f"test_{other}.py").write_text(PASSES, encoding="utf-8")
    folder = "a" if name == "first" else "z"
    ends = "import os\ndef test_it():\n    os._exit(1)\n"
    (tmp_path / f"test_{folder}_ends.py").write_text(ends, encoding="utf-8")
    assert "1 failed, 3 passed" in run(tmp_path, "-n", "1", timeout=PATIENCE).stdout
