"""Tests by assertions: what crosses between them and a completion, and what passes.

Both sides run here, in two threads: what is tested is what they say to each other, and not the sandbox.
"""

from __future__ import annotations

import os
import sys
import threading
import unittest
from typing import Any

import pytest

from prefrl.sandbox import inside


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what the two sides change in their processes."""
    monkeypatch.setattr(sys, "argv", ["-c", "{}"])
    for name in ("__main__", "solution"):
        monkeypatch.setitem(sys.modules, name, inside)
    for name in ("main", "TestProgram"):
        monkeypatch.setattr(unittest, name, unittest.main)


def judged(code: str | None, test: str) -> dict[str, Any]:
    """The verdict on a completion; None: what the tests say without one."""
    if code is None:
        return inside._run_tests(inside._Nobody(), test)
    calls, replies = os.pipe(), os.pipe()

    def serve() -> None:
        try:
            inside._Server(inside._Link(calls[0], replies[1])).serve(code)
        finally:
            os.close(replies[1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return inside._run_tests(inside._Client(inside._Link(replies[0], calls[1])), test)
    finally:
        os.close(calls[1])
        thread.join()
        os.close(calls[0])
        os.close(replies[0])


@pytest.mark.parametrize(
    ("code", "test"),
    [
        pytest.param("def f(x): return 2 * x", "assert f(2) == 4", id="number"),
        pytest.param("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]", id="in place"),
        pytest.param("def f(x): x['a'] = {1}", "x = {}\nf(x)\nassert x == {'a': {1}}", id="dict in place"),
        pytest.param("def f(*a, **k): return a, k", "assert f(1, b=(2,)) == ((1,), {'b': (2,)})", id="tuples"),
        pytest.param(
            "def f(x): return x",
            "for x in [2**99, 1.5, 1j, b'x', 'x', None, {1: {2}}, range(3), frozenset()]:"
            "\n  assert f(x) == x and type(f(x)) is type(x)",
            id="round trip",
        ),
        pytest.param("def f():\n  yield 1\n  yield 2", "assert list(f()) == [1, 2]", id="generator"),
        pytest.param(
            "def f(): return 1 // 0", "try:\n  f()\nexcept ZeroDivisionError: pass\nelse: assert 0", id="raises"
        ),
        pytest.param(
            "class A:\n  def __init__(s, x): s.x = x\n  def get(s): return s.x\n  def __len__(s): return 7",
            "a = A(3)\na.x += 1\nassert a.get() == 4 and len(a) == 7",
            id="class",
        ),
        pytest.param("LIMIT = 3", "assert LIMIT == 3", id="constant"),
        pytest.param(
            "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int", "assert P(1).x == 1", id="dataclass"
        ),
    ],
)
def test_tests_by_assertions_see_what_the_completion_does(code: str, test: str) -> None:
    assert judged(code, test) == {"passed": True}
    assert "passed" not in judged("def f(*args): return 'wrong'", test)


RIGHT = """
class Box:
  def __init__(self, items): self.items = items
  def __getitem__(self, key): return self.items[key]
LIMIT = 3
def f(x): return sorted(x)
def boxed(x): return Box(sorted(x))
def fails(x): raise x
def undecodable(): return b"\\xff".decode()
"""
CASE = """
import unittest
class Test(unittest.TestCase):
  def test(self): self.assertEqual(f([3, 1]), [1, 3])
"""
PASSING = {
    "slice": "assert f([3, 1])[:1] == boxed([3, 1])[:1] == boxed([3, 1])[slice(0, 2, 2)] == [1]",
    "from solution": "from solution import f as g, LIMIT\nassert g([3, 1]) == [1, 3] and LIMIT == 3",
    "import solution": "import solution as s\nassert s.f([3, 1]) == [1, 3] and not hasattr(s, 'g')",
    "all of solution": "def fails(x): pass\nfrom solution import *\nfails(1)\nassert f([3, 1]) == [1, 3]",
    "unittest": f"{CASE}unittest.main()",
    "unittest as a script": f"{CASE}if __name__ == '__main__': raise SystemExit(unittest.main(verbosity=2))",
    "unittest by its program": f"{CASE}from unittest import TestProgram\nTestProgram(exit=False)",
    "unittest by hand": (
        f"{CASE}suite = unittest.defaultTestLoader.loadTestsFromTestCase(Test)\n"
        "result = unittest.TextTestRunner().run(suite)\nraise SystemExit(not result.wasSuccessful())"
    ),
    "script": "import sys\nassert f([3, 1]) == [1, 3]\nsys.exit(0)",
    "error with more than a text": "try: undecodable()\nexcept UnicodeDecodeError: pass\nelse: assert False",
    "next": "i = iter(boxed([1]))\nassert [next(i), next(i, 0), *i] == [1, 0]",
    "expects an error": "try:\n  f(-1)\nexcept TypeError: pass\nelse: raise AssertionError",
}


@pytest.mark.parametrize("test", PASSING.values(), ids=PASSING)
def test_a_right_completion_passes_and_others_do_not(test: str) -> None:
    assert judged(RIGHT, test) == {"passed": True}
    wrong = "class Box: pass\ndef f(x): return 'wrong'\ndef boxed(x): return Box()\nLIMIT = 4\ndef undecodable(): pass"
    for code in (wrong, "x = 1", "raise SystemExit(0)", "def f(x): raise SystemExit(0)"):
        assert "passed" not in judged(code, test)
    assert "doubt" not in judged(None, test)


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit(0)"])
def test_no_error_of_a_completion_steers_the_tests(error: str) -> None:
    cases = "cases = [([3, 1], [1, 3])]\n"
    for test in (
        "assert all(map(lambda case: f(case[0]) == case[1], cases))",
        "assert {*map(str, map(f, [[3, 1]]))} <= {'[1, 3]'}",
        "assert all(x == 1 for x in iter(lambda: f([3, 1])[0], 0))",
        CASE + "unittest.main()",
    ):
        verdict = judged(f"def f(x): raise {error}", cases + test)
        assert "CandidateError" in verdict["failed"]


OWN = "class A:\n  def sort(self, key): pass\nLIMIT = A()\ndef f(x): return A()"


@pytest.mark.parametrize(
    ("code", "test", "verdict"),
    [
        ("def f(x): return map(int, x)", "assert f([3, 1])[:1] == [1]", "failed"),
        ("x = 1", "try: f(-1)\nexcept Exception: pass\nelse: raise AssertionError", "doubt"),
        ("x = 1", f"{CASE}  def test(self): self.assertRaises(Exception, lambda: f(-1))\nunittest.main()", "doubt"),
        (OWN, "r = f([3, 1])\nr.sort(key=lambda v: -v)", "doubt"),
        (OWN, "assert LIMIT != 4\nr = f([3, 1])\nr.sort(key=lambda v: -v)", "doubt"),
        (OWN, "assert LIMIT != 4", "doubt"),
        ("import not_there", "assert f(1)", "failed"),
        ("def f(x): import not_there", "assert f(1)", "failed"),
        ("x = 1", "from solution import f\nassert f(1) == 2", "failed"),
    ],
)
def test_what_a_completion_does_is_no_defect_of_the_tests(code: str, test: str, verdict: str) -> None:
    assert [*judged(code, test)] == [verdict]
    assert "doubt" not in judged(None, test)


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("assert f(", "SyntaxError: "),
        ("def check(candidate): assert candidate(1) == 2", "passes without using anything"),
        ("def check(): assert f([]) == []", "passes without using anything"),
        ("import unittest\nunittest.main()", "passes without using anything"),
        ("assert f(lambda: 1)", "gives the completion a function"),
        ("try: f(print)\nexcept Exception: pass", "gives the completion a builtin_function"),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("from math import not_there", "ImportError: cannot import name 'not_there'"),
    ],
)
def test_a_defect_of_the_tests_is_seen_with_and_without_a_completion(test: str, problem: str) -> None:
    assert problem in judged(RIGHT, test)["doubt"]
    assert problem in judged(None, test)["doubt"]
