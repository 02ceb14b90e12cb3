from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefrl.rewards import (
    RewardRunner,
    accuracy_reward,
    get_cosine_scaled_reward,
    math_checker,
    maths,
    reasoning_accuracy_reward,
)
from prefrl.rewards.math_checker import MathChecker, Verdict

pytest.importorskip("math_verify")

TOWER = "9^{9^{9^{9}}}"  # SymPy never finishes it


@pytest.mark.parametrize(
    ("solution", "text", "score"),
    [
        (r"\frac{1}{3}", r"So it is \boxed{\frac{2}{6}}.", 1.0),
        (r"\frac{1}{3}", r"So it is \boxed{\frac{1}{2}}.", 0.0),
        (r"$\frac{1}{3}$", "a third", 0.0),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", 1.0),
        (r"2\sqrt{2}", r"\boxed{2}", 0.0),
        ("x^2 + 1", r"The final answer is $1 + x^2$.", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1.0),
        ("She sells 3 * 6 = <<3*6=18>>18.\n#### 18", r"\boxed{18}", 1.0),
        ("no formula", r"\boxed{3}", None),
        ("", r"\boxed{3}", None),
        (None, r"\boxed{3}", None),
        (18, r"\boxed{18}", 1.0),
    ],
)
def test_accuracy_is_equality_as_mathematics(solution: str | float | None, text: str, score: float | None) -> None:
    assert accuracy_reward([text], [solution]) == [score]
    assert accuracy_reward([[{"role": "assistant", "content": text}]], solution=[solution]) == [score]


def test_reasoning_is_not_read() -> None:
    texts = [r"<think>\boxed{2}</think> \boxed{3}", r"<think>\boxed{3}</think> \boxed{2}", r"<think>\boxed{3}"]
    assert reasoning_accuracy_reward(texts, ["3"] * 3) == [1.0, 0.0, 0.0]


def test_cosine_prefers_short_right_and_long_wrong() -> None:
    reward = get_cosine_scaled_reward(max_len=100)
    lengths = [0, 50, 100, 200]
    right = reward([r"\boxed{3}"] * 4, ["3"] * 4, [[1] * length for length in lengths])
    wrong = reward([r"\boxed{2}"] * 4, ["3"] * 4, [[1] * length for length in lengths])
    assert right == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert wrong == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    assert reward(completions=["x"], solution=["?"], completion_ids=[[1]]) == [None]


@pytest.fixture
def new_checker() -> Iterator[Callable[..., MathChecker]]:
    started: list[MathChecker] = []

    def new(**options: Any) -> MathChecker:
        started.append(MathChecker(**{"timeout": 5.0, "budget": 60.0, "num_workers": 1, **options}))
        return started[-1]

    yield new
    for checker in started:
        checker.close()


def check(checker: MathChecker, text: str) -> Verdict:
    return checker.check([(text, "3")])[0]


def process_of(checker: MathChecker) -> subprocess.Popen[str]:
    process = checker._workers[0].process
    assert process is not None
    return process


def has_time_now(checker: MathChecker) -> None:
    """Give the worker's next process time to answer on a busy machine."""
    checker._workers[0].timeout = 20.0


def test_worker_that_hangs_is_ended_at_the_deadline_and_replaced(
    new_checker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checker = new_checker(timeout=0.5)
    check(checker, "")
    process = process_of(checker)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        verdict = check(checker, rf"\boxed{{{TOWER}}}")
    assert time.monotonic() - started < 5
    assert (verdict.gold, verdict.is_correct, verdict.is_checked) == ("3", False, False)
    assert "the completion scores 0" in caplog.text
    assert process.returncode is not None  # no zombie
    has_time_now(checker)
    assert check(checker, r"\boxed{3}").is_correct


def test_worker_killed_between_questions_is_replaced(new_checker: Any) -> None:
    checker = new_checker()
    check(checker, "")
    process_of(checker).kill()
    process_of(checker).wait()
    assert check(checker, r"\boxed{3}").is_correct


@pytest.mark.parametrize("length", [1, 10**6], ids=["short", "longer than the pipe"])
def test_worker_that_is_stopped_is_killed_and_replaced(
    length: int, new_checker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_checker, "_GRACE_S", 0.1)
    checker = new_checker(timeout=0.2)
    check(checker, "")
    process_of(checker).send_signal(signal.SIGSTOP)
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(check(checker, "x" * length)), daemon=True)
    thread.start()
    thread.join(20)
    assert verdicts == [Verdict(None, is_checked=False)]
    has_time_now(checker)
    assert check(checker, r"\boxed{3}").is_correct


def test_endless_answers_share_a_budget(new_checker: Any, caplog: pytest.LogCaptureFixture) -> None:
    checker = new_checker(timeout=0.3, budget=0.2)
    verdicts = checker.check([(rf"\boxed{{{TOWER}}}", "3")] * 3 + [(r"\boxed{3}", "3")])
    assert verdicts == [Verdict("3", is_checked=False)] + [Verdict(None, is_checked=False)] * 3
    assert "3 of 4 completions were not checked within 0.2 s" in caplog.text


def test_others_are_checked_while_an_endless_answer_runs(new_checker: Any) -> None:
    checker = new_checker(timeout=4.0, budget=2.0, num_workers=2)
    verdicts = checker.check([(rf"\boxed{{{TOWER}}}", "3")] + [(r"\boxed{3}", "3"), (r"\boxed{4}", "3")] * 2)
    assert [verdict.is_checked for verdict in verdicts] == [False, True, True, True, True]
    assert [verdict.is_correct for verdict in verdicts] == [False, True, False, True, False]
    assert len(checker._workers) == 2


def test_worker_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import os; from prefrl.rewards.maths import _checker; _checker.check([('', '3')]);"
        "print(_checker._workers[0].process.pid, flush=True); os._exit(0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    pid = int(run.stdout)
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return listed.strip() != "" and not listed.strip().startswith("Z")


def test_share_of_unchecked_completions_and_parsed_texts_are_logged(
    new_checker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maths, "_checker", new_checker(timeout=0.5))
    scores = RewardRunner(accuracy_reward).score(
        ["p"] * 5,
        [r"\boxed{3}", "nothing to compare with", rf"\boxed{{{TOWER}}}", "none", r"\boxed{4}"],
        [[1]] * 5,
        {"solution": ["3", None, "3", "3", "no formula"]},
    )
    assert scores.by_name == {"accuracy_reward": [1.0, None, 0.0, 0.0, None]}
    assert scores.metrics == {"accuracy_reward/unchecked_fraction": 0.2}
    assert scores.extra == {"gold_parsed": ["3", None, "3", "3", None], "answer_parsed": ["3", None, None, None, None]}


def test_works_in_a_thread() -> None:
    # math-verify's own time-outs are signals, which only a main thread gets.
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.extend(accuracy_reward([r"\boxed{3}"], ["3"])))
    thread.start()
    thread.join()
    assert scores == [1.0]
