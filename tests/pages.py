"""The pages of the docs, and the code on them."""

import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The model of most pages.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# A block that needs something beside it has a comment in the line before it, which names the file of the test that
# has it: <!-- no-run: tests/cli/test_tutorials.py runs it with a tiny model -->
PYTHON_BLOCK = re.compile(r"^(<!-- no-run: [^\n]+ -->\n)?```python\n(.*?)^```", re.M | re.S)
# The first line of a file names it: `# sums.py`, `# prefrl grpo grpo.yaml`.
FILE = re.compile(r"^```(?:python|yaml)\n(# (?:prefrl \w+ )?(\S+)\n.*?)^```", re.M | re.S)
SHELL_BLOCK = re.compile(r"^( *)```(?:bash|sh|shell|console)\n(.*?)^\1```", re.M | re.S)
# Tutorials whose blocks build on each other, and run in their order.
IN_ORDER = ("first_run", "reward_ppo")


def module(path: Path) -> ModuleType:
    """A file of Python, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def name(path: Path) -> str:
    """How a test is called that is about this file."""
    return path.relative_to(ROOT).as_posix()


def marked_block(page: str, text: str) -> str:
    """The only marked block of Python on a page of the docs that has this text."""
    blocks = PYTHON_BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    (code,) = [code for no_run, code in blocks if no_run and text in code]
    return code


def shell_blocks(text: str) -> list[str]:
    """The shell blocks of a page, without the prompts of a console."""
    blocks = [textwrap.dedent(block) for _, block in SHELL_BLOCK.findall(text)]
    return [re.sub(r"^\$ ", "", block, flags=re.M) for block in blocks]


def shell_lines(page: str, start: str) -> list[str]:
    """The lines of shell blocks on a page of the docs that begin so; a line that is continued is one."""
    blocks = shell_blocks((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line.startswith(start)]
