"""Shell commands on the pages and in the help are well-formed, and those of the README do what it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prefrl.registry import REGISTRY
from prefrl.scripts.main import OTHERS, main
from tests.cli.conftest import run_line, write_jsonl
from tests.cli.test_docs import MODEL, PAGES, ROOT, name

BLOCK = re.compile(r"^( *)```(?:bash|sh|shell|console)\n(.*?)^\1```", re.M | re.S)
PROGRAMS = {
    *("prefrl", "accelerate", "python", "python3", "pip", "make", "sbatch", "curl"),
    *("cd", "export", "ln", "mkdir"),
}


def blocks_of(text: str) -> list[str]:
    """The shell blocks of a page, without the prompts of a console."""
    blocks = [textwrap.dedent(block) for _, block in BLOCK.findall(text)]
    return [re.sub(r"^\$ ", "", block, flags=re.M) for block in blocks]


def check(script: str) -> None:
    """Bash can parse it, and each line calls a program: a comment that is wrapped like prose is a command for bash."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}in:\n{script}"
    for line in script.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        assert not words or Path(words[0]).name in PROGRAMS, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shell_blocks_of_the_pages_parse(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        check(block)


def test_commands_in_the_help_parse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Indented below `Example:`, or at the end of a line, behind a colon."""
    monkeypatch.setenv("COLUMNS", "1000")
    found = 0
    for words in ([], *([command] for command in (*REGISTRY, *OTHERS))):
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
        for line in re.findall(r"(?<!usage)(?:^ +|: )(prefrl .*)$", capsys.readouterr().out, re.M):
            check(line)
            found += 1
    assert found > 2 * len(REGISTRY)


class Try(NamedTuple):
    """How a block of the README is run."""

    about: str
    run: Callable[[str, Path], None]


def _make(block: str, _: Path) -> None:
    """What the target would do."""
    # The variables of `make test`, if that runs the tests, would make it tell its folder in the last line.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = [*shlex.split(block), "--dry-run", "--always-make"]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("/prefrl demo")


def _pip(block: str, _: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for _, _, flag, package in (shlex.split(line, comments=True) for line in block.splitlines()):
        assert flag == "-e"
        assert set(package.removeprefix(".").strip("[]").split(",")) <= {*extras, ""}


def _prefrl(block: str, model: Path) -> None:
    first, *rest = block.splitlines()
    run_line(first)
    text = Path("run.yaml").read_text(encoding="utf-8").replace(MODEL, str(model))
    text = text.replace("max_steps: 100", "max_steps: 1")
    Path("run.yaml").write_text(f"{text}\nuse_cpu: true\nmax_completion_length: 4\n", encoding="utf-8")
    for line in rest:
        if "--num_processes" in line:
            line = line.replace("prefrl grpo", "prefrl launch grpo") + " --dry_run"
        if line and not line.startswith("#"):
            run_line(line)


README_BLOCKS = {
    "make demo": Try("make prints its commands: CI runs the demo itself, by `make demo-gain`", _make),
    "prefrl init": Try(
        "run for one step on a tiny model, in the file that the first line writes; of the run with four processes and "
        "a server, which would take minutes, the command that starts it is printed instead",
        _prefrl,
    ),
    "pip install": Try("the extras are looked up: to install them takes minutes and a network; CI does so", _pip),
}


def test_commands_of_the_readme_run(
    workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """See `README_BLOCKS`."""
    write_jsonl(workspace / "data.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 8)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n"))
    blocks = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) == len(README_BLOCKS)
    for block, (start, trial) in zip(blocks, README_BLOCKS.items(), strict=True):
        assert block.startswith(start)
        trial.run(block, model_folder)
    assert (workspace / "runs/grpo/report.html").is_file()
    printed = capsys.readouterr().out
    assert "model> " in printed
    assert "vllm-serve --model" in printed
