"""The lines of prefrl that name CUDA, found in its source, and those that a test runs."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import prefrl

ROOT = Path(prefrl.__file__).parent
# What names it, or another device like it: identifiers, and texts.
_NAMES = {"cuda", "is_cuda", "mps", "xpu", "ProcessGroupNCCL"}
_TEXTS = re.compile(r"(cuda|mps|xpu|nccl)(:\d+)?")
_IN_FILES = re.compile("cuda|mps|xpu|nccl|accelerator", re.IGNORECASE)

Lines = dict[str, set[tuple[str, int]]]


@cache
def lines_that_name_cuda() -> Lines:
    """module:function -> files and numbers of lines, also of the first line of what is done on the condition of one.

    Types, examples of rules and tables of the options of other libraries do not count.
    """
    found: Lines = defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text("utf-8")
        if _IN_FILES.search(text) and path.parent.name != "foreign":
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            _search(ast.parse(text), found, str(path), f"{module}:")
    return dict(found)


def _search(node: ast.AST, found: Lines, path: str, scope: str) -> None:
    for child in ast.iter_child_nodes(node):
        name = child.value if isinstance(child, ast.Subscript) else child.func if isinstance(child, ast.Call) else None
        if isinstance(name, ast.Name) and name.id in ("Literal", "example"):
            continue
        if isinstance(child, ast.expr) and _names_cuda(child):
            found[scope].add((path, child.lineno))
        if isinstance(child, ast.If) and any(map(_names_cuda, ast.walk(child.test))):
            found[scope].add((path, child.body[0].lineno))
        own = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own = f"{scope}{'' if scope.endswith(':') else '.'}{child.name}"
        _search(child, found, path, own)


def _names_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_torchs = node.attr == "accelerator" and isinstance(node.value, ast.Name) and node.value.id == "torch"
        return node.attr in _NAMES or is_torchs
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _TEXTS.fullmatch(node.value) is not None
    return isinstance(node, ast.Name) and node.id in _NAMES


@contextmanager
def traced(places: Collection[str]) -> Iterator[dict[str, list[int]]]:
    """Yields what holds, after this context, the lines of these places that have not run in it, on any thread."""
    lines = {place: lines_that_name_cuda()[place] for place in places}
    files = {path for found in lines.values() for path, _ in found}
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return note if frame.f_code.co_filename in files else None

    missed: dict[str, list[int]] = {}
    before, before_in_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield missed
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)  # type: ignore[arg-type]  # None is allowed, too
        left = {place: sorted(line for _, line in found - seen) for place, found in lines.items()}
        missed.update({place: numbers for place, numbers in left.items() if numbers})
