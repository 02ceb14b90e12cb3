"""How much there is to read: bars that push back where code is cut into ever smaller pieces.

The other bars limit functions and files from above, and each can be kept by one more function, file, class or list.
A bar here that is exceeded says what grew; `python -m tests.unit.test_reading` prints today's measures.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.losses.per_token import token_weights, trainable_per_row
from prefrl.options.fields import listed_fields
from prefrl.registry import REGISTRY
from tests.launch import run
from tests.private_names import ROOT, SOURCES
from tests.walks import Walk, tree

BARS: dict[str, float] = {
    # Functions and files that a reader meets: in the third step of a run without options, and from `prefrl grpo` to
    # its trainer.
    "functions of a grpo step": 278,  # three of processes that share rows: who samples, and what a team has sampled
    "files of a grpo step": 50,
    "functions of a dpo step": 197,
    "files of a dpo step": 32,
    "functions of a sft step": 146,
    "files of a sft step": 29,
    "functions from the command line to a trainer": 342,
    "files from the command line to a trainer": 67,  # one has the options of teachers
    # Classes of ours that one object is made of, at most over the algorithms.
    "classes of a trainer": 4,
    "classes of a config": 13,
    # Six of them are the scripts of a few lines that launchers find by their path.
    # Eleven are of distillation, sixteen of agents, twelve of servers that come and go or sleep, of deltas and late
    # groups, one of router replay, eight for other training loops and engines, two of the values of tokens.
    "files of the library": 345,
    # Module docstring, imports, `__all__` and what is imported for type checkers alone.
    "percent of all lines that are headers": 8.0,
    # See `places`.
    "places of the option with most places": 18,
    # Twenty-one are of distillation, four of verl's names for ours, four of a server on the device of training,
    # one of the values of tokens.
    "places of options beyond their first": 359,
}


def measures() -> dict[str, float]:
    """What the bars bound."""
    found: dict[str, float] = {}
    for name, functions in _walks().items():
        what = "from the command line to a trainer" if name == "command" else f"of a {name} step"
        found[f"functions {what}"] = len(functions)
        found[f"files {what}"] = len({file for file, _ in functions})
    found["classes of a trainer"] = max(len(own(row.load_trainer())) for row in REGISTRY.values())
    found["classes of a config"] = max(len(own(row.load_config())) for row in REGISTRY.values())
    found["files of the library"] = len(SOURCES)
    headers, lines = (sum(numbers) for numbers in zip(*map(lines_of_header, SOURCES), strict=True))
    found["percent of all lines that are headers"] = round(100 * headers / lines, 1)
    numbers = Counter(option for option, _ in places())
    found["places of the option with most places"] = max(numbers.values())
    found["places of options beyond their first"] = numbers.total() - len(numbers)
    return found


def exceeded(measured: dict[str, float], bars: dict[str, float]) -> list[str]:
    """What is above its bar, in words."""
    return [f"{name}: {measured[name]}, and the bar is {bar}" for name, bar in bars.items() if measured[name] > bar]


@cache
def _walks() -> dict[str, list[tuple[str, str]]]:
    result: dict[str, list[tuple[str, str]]] = json.loads(run([sys.executable, "-m", "tests.walks"]))
    return result


def own(cls: type) -> list[type]:
    """The classes of prefrl among those that a class is made of, itself included."""
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "prefrl"]


def lines_of_header(path: Path) -> tuple[int, int]:
    """The lines of a file's header that are not blank, and all its lines."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    header = [
        line for node in ast.parse(text).body if _is_header(node) for line in lines[node.lineno - 1 : node.end_lineno]
    ]
    return sum(bool(line.strip()) for line in header), len(lines)


def _is_header(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)


@cache
def places() -> frozenset[tuple[str, str]]:
    """Pairs of an option of ours and a place that must be known to whoever changes the option.

    A place is a class that declares the option's field; a table of a module or of a class, which has the name as a key
    or as an element of a list; and a data file that has the name. What reads the option is none, and neither are the
    arguments of a call, such as a rule's, the words of a `Literal`, and the tables that translate options of other
    libraries, or fields of the requests of chat APIs. Names of TRL that configs only take are no options.
    """
    configs = [row.load_config() for row in REGISTRY.values()]
    fields = {field.name for config in configs for field in listed_fields(config)}
    declared = {(name, cls.__name__) for config in configs for cls in own(config) for name in get_annotations(cls)}
    found = {(name, cls) for name, cls in declared if name in fields}
    options = {name for name, _ in found}
    for path in SOURCES:
        if not {"foreign", "gateway", "migrate"} & {*path.parts}:
            file = path.relative_to(ROOT).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {(name, f"{file}: {table}") for table, name in _named_in_tables(tree.body) if name in options}
    for path in (ROOT / "prefrl").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        found |= {(name, path.name) for name in options if f'"{name}"' in text}
    return frozenset(found)


def _named_in_tables(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Each literal table that a body assigns, with each constant in it."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{table}", value) for table, value in _named_in_tables(node.body))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not (_is_header(node) or _is_type(node.value)):
            table = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            for part in ast.walk(node.value):
                entries = part.keys if isinstance(part, ast.Dict) else getattr(part, "elts", [])
                yield from ((table, entry.value) for entry in entries if isinstance(entry, ast.Constant))


def _is_type(value: ast.expr | None) -> bool:
    return value is None or ast.unparse(value).startswith("Literal[")


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    return measures()


def test_there_is_no_more_to_read_than_there_was(measured: dict[str, float]) -> None:
    assert measured.keys() == BARS.keys()
    assert not exceeded(measured, BARS)


@pytest.mark.parametrize("name", BARS)
def test_a_bar_that_is_exceeded_is_named(name: str, measured: dict[str, float]) -> None:
    bars = {**measured, name: measured[name] - 0.1}
    assert exceeded(measured, bars) == [f"{name}: {measured[name]}, and the bar is {bars[name]}"]


def test_a_tree_shows_what_each_function_calls_and_nothing_twice() -> None:
    walk, rows = Walk(is_on=True), (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long), 1)
    walk.through(lambda: [token_weights(*rows, reduction="sequence_mean"), trainable_per_row(*rows)])
    shown = [line.partition(" (")[0] + line.partition("lines)")[2] for line in tree(walk.calls)]
    inner = ["trainable_per_row", "  check_same_shape"]
    assert shown == ["token_weights", "  check_same_shape", *(f"  {line}" for line in inner), "trainable_per_row ..."]


if __name__ == "__main__":
    print(json.dumps(measures(), indent=4))
    for option, number in Counter(option for option, _ in places()).most_common(10):
        print(number, option, sorted(place for name, place in places() if name == option))
