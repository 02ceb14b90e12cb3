"""What is in the wheel and in the source distribution, and what runs with a part of what they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from prefrl import ConfigError, SFTConfig, __version__
from prefrl.scripts.main import OTHERS
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOP = f"prefrl-{__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and below `unpacked` what is in it, of which the wheel is built."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        patch.delenv("PREFRL_REPOSITORY", raising=False)
        next(SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
        with tarfile.open(folder / f"{TOP}.tar.gz") as archive:
            archive.extractall(folder / "unpacked", filter="data")
        source = str(folder / "unpacked" / TOP)
        next(WheelBuilder(source).build(directory=str(folder), versions=["standard"]))
        again = folder / "again"
        next(WheelBuilder(str(ROOT)).build(directory=str(again), versions=["standard"]))
        next(SdistBuilder(source).build(directory=str(again), versions=["standard"]))
    return folder


def files_in(folder: Path) -> set[str]:
    """The files of a folder that are no caches."""
    paths = (Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names)
    return {path.relative_to(folder).as_posix() for path in paths if path.suffix != ".pyc"}


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"{TOP}.dist-info/METADATA"))


def test_the_wheel_has_all_files_of_the_package_and_no_others(built: Path) -> None:
    """Also those that are no code: configs of accelerate, tables, the page of a run, the mark of typed packages."""
    with zipfile.ZipFile(wheel_of(built)) as archive:
        names = set(archive.namelist())
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert names == {f"{TOP}.dist-info/{name}" for name in about} | {
        f"prefrl/{name}" for name in files_in(ROOT / "prefrl")
    }
    assert {"prefrl/py.typed", "prefrl/scripts/launch/accelerate_configs/zero3.yaml"} <= names


def test_the_source_distribution_has_what_tests_and_packagers_need(built: Path) -> None:
    source = built / "unpacked" / TOP
    for folder in ("prefrl", "tests", "examples", "docs"):
        assert files_in(source / folder) == files_in(ROOT / folder)
    kept = {path.name for path in source.iterdir()}
    assert kept >= {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "hatch_build.py"}
    assert kept.isdisjoint({".git", ".ci", ".github", "site", "runs", "dist"})


def test_two_builds_are_equal(built: Path) -> None:
    """Of a clone and of the source distribution, whose files have other times."""
    assert wheel_of(built).read_bytes() == wheel_of(built / "again").read_bytes()
    assert (built / f"{TOP}.tar.gz").read_bytes() == (built / "again" / f"{TOP}.tar.gz").read_bytes()


def test_the_page_of_a_release_links_to_its_repository(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFRL_REPOSITORY", "https://example.org/us/prefrl/")
    next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    page = metadata_of(wheel_of(tmp_path))
    assert "Source, https://example.org/us/prefrl" in (page.get_all("Project-URL") or [])
    text = page.get_payload()
    assert f"](https://example.org/us/prefrl/blob/v{__version__}/docs/vllm.md)" in text
    assert f"](https://example.org/us/prefrl/raw/v{__version__}/docs/figures/live_view.svg)" in text
    assert not re.findall(r"\]\((?!https:|#)[^)]*\)", text)
    # Without an address, none is invented.
    plain = metadata_of(wheel_of(built))
    assert plain.get_all("Project-URL") is None
    assert plain.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_classifiers_name_the_versions_of_python_that_the_tests_run_with() -> None:
    prefix = "Programming Language :: Python :: "
    found = [row.removeprefix(prefix) for row in PROJECT["project"]["classifiers"] if row.startswith(f"{prefix}3.")]
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    (versions,) = re.findall(r"python: (\[.*\])", workflow)
    assert re.findall(r"3\.\d+", versions) == found
    assert PROJECT["project"]["requires-python"] == f">={found[0]}"


def outcomes(program: str, *lines: str) -> list[tuple[str, object]]:
    """Run commands of prefrl in one process, behind a program; what each has printed, and its exit code."""
    asked = f"""
import contextlib, io, json
from prefrl.scripts.main import main
rows = []
for line in {lines!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(line.split())
        except SystemExit as error:
            code = error.code
    rows.append((out.getvalue(), code))
print(json.dumps(rows))
"""
    command = [sys.executable, "-c", program + asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return [(text, code) for text, code in json.loads(done.stdout)]


# The import of anything else fails, as if it were not installed.
ONLY = """
import sys
class Only:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] not in {*sys.stdlib_module_names, 'prefrl', 'yaml', 'annotated_types'}:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Only())
"""


def test_commands_that_train_nothing_need_two_small_packages_and_others_name_what_is_missing() -> None:
    lines = ("--version", "--help", "grpo --help", "doctor --help", "migrate --help", "env", "init grpo")
    rows = outcomes(ONLY, *lines)
    assert [code for _, code in rows] == [0] * len(lines)
    assert "#resume_from_checkpoint: null" in rows[-1][0]
    ((text, code),) = outcomes(ONLY, "look runs/grpo")
    missing = "prefrl look: ModuleNotFoundError: No module named 'pyarrow'. prefrl --debug look shows where; "
    assert text.splitlines() == [f"{missing}pip install prefrl installs what it needs"]
    assert code == 1


def test_without_torch_no_gpu_is_known_where_no_driver_tells_of_it() -> None:
    ((text, code),) = outcomes(f"{ONLY}\nsys.platform = 'darwin'\n", "env")
    assert "\n- GPU: unknown (No module named 'torch')\n" in text
    assert code == 0


# What Python has not on Windows. Other libraries are imported before: theirs for Windows are not here.
WINDOWS = """
import asyncio, concurrent.futures.process, importlib, multiprocessing.pool, os, rich.console, rich.progress
import pyarrow.parquet, signal, subprocess, sys, tempfile, yaml
for module in ('fcntl', 'grp', 'pwd', 'resource', 'termios'):
    sys.modules[module] = None
for name in ('O_CLOEXEC', 'O_DIRECTORY', 'O_NOFOLLOW', 'O_NONBLOCK', 'fork', 'geteuid', 'getuid', 'killpg', 'pread',
             'pwrite', 'register_at_fork', 'setsid', 'uname'):
    delattr(os, name)
for name in ('SIGALRM', 'SIGHUP', 'SIGKILL', 'SIGRTMAX', 'SIGUSR1', 'pthread_kill', 'pthread_sigmask', 'setitimer'):
    delattr(signal, name)
sys.platform = 'win32'
"""


def test_windows_reads_and_prepares_runs_and_refuses_to_train(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "1+1=2"}\n', encoding="utf-8")
    anywhere = [name for name, command in OTHERS.items() if command.is_anywhere]
    lines = [f"{name} --help" for name in (*anywhere, "sft")]
    refused = [f"sft --model_name_or_path m --dataset_name {texts}"]
    refused += [name for name, command in OTHERS.items() if not command.is_anywhere]
    rows = outcomes(WINDOWS, "init sft", "look nothing", *lines, *refused)
    assert rows[0][0].startswith("# prefrl sft")
    assert rows[1][1] == 2
    assert "nothing" in rows[1][0]
    assert [code for _, code in rows[2 : -len(refused)]] == [0] * len(lines)
    for line, (text, code) in zip(refused, rows[-len(refused) :], strict=True):
        start = f"prefrl {line.split()[0]}: ConfigError: prefrl {line.split()[0]} needs Linux or macOS, not Windows."
        assert (text.startswith(start), code) == (True, 2)


def test_a_trainer_refuses_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = SFTConfig(str(tmp_path), use_cpu=True)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match=r"a training needs Linux or macOS, not Windows\. Run it in the Windows Sub"):
        config.check_packages_installed()
