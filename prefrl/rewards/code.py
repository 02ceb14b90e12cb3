"""Rewards for code that passes tests in a sandbox."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from prefrl.errors import ConfigError, DataError
from prefrl.rewards.base import answer_all, completion_text, excerpt
from prefrl.rewards.maths import final_part
from prefrl.sandbox import LANGUAGES, AssertionTest, InputOutputTest, LocalSandbox, Sandbox, Verdict

logger = logging.getLogger(__name__)

Test = InputOutputTest | AssertionTest
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_LINE_END = re.compile(r"\r\n?|\n")  # of Python and Markdown; `splitlines` also splits within texts
_MOST_WORKERS = 8
# A completion whose failed tests took more than this part of its share of a batch's time waits for all others.
_PATIENCE = 0.5


def last_code_block(text: str, language: str) -> str | None:
    """The last fenced code block marked with a language; without any, the last one with no mark; or None.

    A block that is not closed is none. Reasoning up to `</think>` is skipped.

    Args:
        text: Text in Markdown.
        language: A key of `LANGUAGES`.
    """
    marks = LANGUAGES[language]
    blocks = list(_blocks(final_part(text) or ""))
    marked = [code for mark, code in blocks if mark.lower() in marks]
    bare = [code for mark, code in blocks if not mark]
    found = marked or bare
    return found[-1] if found else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Mark and content of each closed block."""
    fence = mark = ""
    lines: list[str] = []
    for line in _LINE_END.split(text):
        match = _FENCE.fullmatch(line)
        if not fence:
            if match:
                fence, mark, lines = match[1], match[2], []
        elif match and match[1].startswith(fence) and not match[2]:
            yield mark, "\n".join([*lines, ""])
            fence = ""
        else:
            lines.append(line)


def get_code_reward(
    tests: Literal["test_cases", "test_code"] = "test_cases",
    *,
    language: str = "python",
    all_or_nothing: bool = False,
    sandbox: Sandbox | None = None,
    budget: float = 300.0,
    num_workers: int | None = None,
) -> _CodeReward:
    """A reward for code: the fraction of the tests that it passes, or 1 if it passes all and 0 otherwise.

    The code is the last fenced block of the completion; without one, the reward is 0. Each test runs in new processes.
    A test that ends without a verdict, for whatever reason, is a failure. Tests that were not run because the batch
    took too long leave a completion without a score (None). If its own failed tests took long, they count as failures
    instead. A sandbox that does not start is an error, and so is a test that cannot judge any completion.

    Args:
        tests: Column that holds the tests. In "test_cases", each row has a list of `{"input": ..., "output": ...}`,
            the standard input of a program and the standard output that is expected. In "test_code", each row has
            Python code with assertions, or a list of such programs, each of which is a test.
        language: Language of the programs, "python" or "bash".
        all_or_nothing: Whether all tests have to pass.
        sandbox: Where the code runs. None means `LocalSandbox()`.
        budget: Time limit for a batch in seconds. It must be less than the config's `reward_timeout`.
        num_workers: Number of tests that run at the same time. The default is one for each CPU, up to 8.

    Raises:
        ConfigError: An argument is not allowed.
    """
    if tests not in _CLASSES:
        raise ConfigError(f"tests={tests!r}: allowed are {', '.join(map(repr, _CLASSES))}")
    if language not in LANGUAGES:
        raise ConfigError(f"language={language!r}: allowed are {', '.join(map(repr, LANGUAGES))}")
    if tests == "test_code" and language != "python":
        raise ConfigError(f"language={language!r}: tests by assertions are in Python; use tests='test_cases'")
    if not budget > 0:
        raise ConfigError(f"budget={budget}: needs to be > 0 seconds")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers={num_workers}: needs to be >= 1, or None for one for each CPU")
    workers = num_workers if num_workers is not None else min(_MOST_WORKERS, os.cpu_count() or 1)
    return _CLASSES[tests](language, all_or_nothing, LocalSandbox() if sandbox is None else sandbox, budget, workers)


@dataclass(slots=True)
class _Candidate:
    """A completion's code, and what is known about it."""

    row: int  # of the batch
    code: str | None
    tests: list[Test]
    patience_s: float
    verdicts: list[Verdict | None] = field(init=False)
    num_begun: int = 0
    num_running: int = 0
    lost_s: float = 0.0  # in tests that failed

    def __post_init__(self) -> None:
        self.verdicts = [None] * len(self.tests)

    @property
    def is_slow(self) -> bool:
        return self.lost_s > self.patience_s

    def score(self, all_or_nothing: bool) -> float | None:
        if not self.tests:
            return None
        if self.code is None:
            return 0.0
        num_passed = sum(verdict is not None and verdict.passed for verdict in self.verdicts)
        if all_or_nothing and self.has_failed():
            return 0.0
        if None in self.verdicts and not self.is_slow:
            return None
        return float(num_passed == len(self.tests)) if all_or_nothing else num_passed / len(self.tests)

    def has_failed(self) -> bool:
        return any(verdict is not None and not verdict.passed for verdict in self.verdicts)

    def summary(self) -> str | None:
        """For the table of completions."""
        if not self.tests:
            return None
        if self.code is None:
            return "no code"
        reasons = ["not run" if verdict is None else verdict.reason for verdict in self.verdicts]
        return "; ".join(dict.fromkeys(reasons))


class _Line:
    """The tests of a batch that wait for a worker."""

    def __init__(self, candidates: Sequence[_Candidate]) -> None:
        self.candidates = candidates
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Iterator[tuple[_Candidate, int]]:
        """Context of a test: the next one of the completion that has the fewest running. Slow completions come last.

        Then a completion that sleeps until its tests are ended holds up one worker at a time, and not for long.
        """
        with self._lock:
            waiting = (candidate for candidate in self.candidates if candidate.num_begun < len(candidate.tests))
            candidate = min(waiting, key=lambda candidate: (candidate.is_slow, candidate.num_running))
            number = candidate.num_begun
            candidate.num_begun += 1
            candidate.num_running += 1
        began = time.monotonic()
        try:
            yield candidate, number
        finally:
            verdict = candidate.verdicts[number]
            with self._lock:
                candidate.num_running -= 1
                if verdict is not None and not verdict.passed:
                    candidate.lost_s += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _CodeReward:
    language: str
    all_or_nothing: bool
    sandbox: Sandbox
    budget: float
    num_workers: int

    @property
    def __name__(self) -> str:
        return "code_reward"

    def setup(self) -> None:
        self.sandbox.setup()

    def _scores(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        tests: Sequence[list[Test]],
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> list[float | None]:
        codes = [last_code_block(completion_text(completion), self.language) for completion in completions]
        patience_s = _PATIENCE * self.budget * self.num_workers / max(len(codes), 1)
        candidates = [
            _Candidate(row, code, its_tests, patience_s)
            for row, (code, its_tests) in enumerate(zip(codes, tests, strict=True))
        ]
        self._run(candidates)
        _tell_doubts(candidates)
        scores = [candidate.score(self.all_or_nothing) for candidate in candidates]
        tested = [(c, score) for c, score in zip(candidates, scores, strict=True) if c.tests]
        if log_extra is not None:
            log_extra("code_verdict", [candidate.summary() for candidate in candidates])
        if log_metric is not None and tested:
            log_metric("code_reward/no_code_fraction", sum(c.code is None for c, _ in tested) / len(tested))
            log_metric("code_reward/unchecked_fraction", sum(score is None for _, score in tested) / len(tested))
        return scores

    def _run(self, candidates: Sequence[_Candidate]) -> None:
        """Run all tests, or as many as the budget allows."""
        line = _Line([candidate for candidate in candidates if candidate.code is not None])
        numbers = range(sum(len(candidate.tests) for candidate in line.candidates))
        answers = answer_all(
            numbers, lambda: self._worker(line), budget=self.budget, num_threads=self.num_workers, name="code tests"
        )
        num_left = sum(answer is None for answer in answers)
        if num_left:
            logger.warning(
                "code_reward: %d of %d tests were not run within budget=%s s. Raise budget or num_workers, or lower "
                "the limits of the sandbox",
                num_left,
                len(numbers),
                self.budget,
            )

    @contextmanager
    def _worker(self, line: _Line) -> Iterator[Callable[[int], bool]]:
        yield lambda _: self._answer(line)

    def _answer(self, line: _Line) -> bool:
        with line.next() as (candidate, number):
            assert candidate.code is not None
            if self.all_or_nothing and candidate.has_failed():
                return True
            test = candidate.tests[number]
            verdict = self.sandbox.check(self.language, candidate.code, test)
            if verdict.defect is not None:
                raise DataError(
                    f"code_reward, row {candidate.row} of the batch: test {number} cannot judge any completion: "
                    f"{_complaint(test, verdict.defect)}"
                )
            candidate.verdicts[number] = verdict
        return True


class _TestCasesReward(_CodeReward):
    __slots__ = ()

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        test_cases: Sequence[Sequence[Mapping[str, Any]] | None],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        tests = [_input_output_tests(row, cases) for row, cases in enumerate(test_cases)]
        return self._scores(completions, tests, log_extra, log_metric)


class _TestCodeReward(_CodeReward):
    __slots__ = ()

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        test_code: Sequence[str | Sequence[str] | None],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        tests = [_assertion_tests(row, code) for row, code in enumerate(test_code)]
        return self._scores(completions, tests, log_extra, log_metric)


_CLASSES: Mapping[str, type[_CodeReward]] = {"test_cases": _TestCasesReward, "test_code": _TestCodeReward}


def _input_output_tests(row: int, cases: object) -> list[Test]:
    if cases is None:
        return []
    if not isinstance(cases, Sequence) or isinstance(cases, str):
        raise DataError(_not_allowed("test_cases", row, cases, _CASES_ALLOWED))
    for case in cases:
        if not isinstance(case, Mapping) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise DataError(_not_allowed("test_cases", row, case, _CASES_ALLOWED))
    return [InputOutputTest(case["input"], case["output"]) for case in cases]


def _assertion_tests(row: int, code: object) -> list[Test]:
    if code is None:
        return []
    codes = [code] if isinstance(code, str) else code
    if not isinstance(codes, Sequence) or not all(isinstance(text, str) for text in codes):
        raise DataError(_not_allowed("test_code", row, code, "a text of Python code, a list of such texts, or None"))
    return [AssertionTest(text) for text in codes]


def _tell_doubts(candidates: Sequence[_Candidate]) -> None:
    """Warn of a test that several completions all failed in a way that may be the test's fault, but need not be."""
    verdicts: dict[Test, list[Verdict | None]] = {}
    for candidate in candidates:
        if candidate.code is not None:
            for test, verdict in zip(candidate.tests, candidate.verdicts, strict=True):
                verdicts.setdefault(test, []).append(verdict)
    for test, found in verdicts.items():
        doubts = [verdict.doubt for verdict in found if verdict is not None and verdict.doubt is not None]
        if len(doubts) == len(found) > 1:
            _warn_once(test, doubts[0])


@functools.cache
def _warn_once(test: Test, doubt: str) -> None:
    logger.warning(
        "code_reward: all completions of a row failed a test in a way for which the test may be to blame: %s",
        _complaint(test, doubt),
    )


def _complaint(test: Test, problem: str) -> str:
    shown = excerpt(test.code if isinstance(test, AssertionTest) else test.input)
    return (
        f"{problem}. Correct the test or leave it out; if it needs a package, give LocalSandbox(python=...) an "
        f"interpreter that has it. The test is {shown}"
    )


_CASES_ALLOWED = 'a list of {"input": text, "output": text}, or None'


def _not_allowed(column: str, row: int, value: object, allowed: str) -> str:
    shown = repr(value)
    return f"column {column!r}, row {row}: {shown[:200]}; allowed is {allowed}"
