from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest

from prefrl.rewards import RewardRunner, accuracy_reward, get_cosine_scaled_reward, maths, reasoning_accuracy_reward
from prefrl.rewards.maths import MathChecker

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


def test_worker_that_hangs_is_ended_at_the_deadline_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    checker = MathChecker(timeout=0.5)
    try:
        assert checker.check(r"\boxed{3}", "3").is_correct
        process = checker._process
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            verdict = checker.check(rf"\boxed{{{TOWER}}}", "3")
        assert time.monotonic() - started < 5
        assert (verdict.gold, verdict.is_correct, verdict.is_checked) == ("3", False, False)
        assert "the completion scores 0" in caplog.text
        assert process is not None
        assert process.returncode is not None  # no zombie
        assert checker.check(r"\boxed{3}", "3").is_correct
    finally:
        checker.close()


def test_worker_killed_between_questions_is_replaced() -> None:
    checker = MathChecker(timeout=5)
    try:
        checker.check("", "3")
        assert checker._process is not None
        checker._process.kill()
        checker._process.wait()
        assert checker.check(r"\boxed{3}", "3").is_correct
    finally:
        checker.close()


def test_worker_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import os; from prefrl.rewards.maths import _checker; _checker.check('', '3');"
        "print(_checker._process.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return listed.strip() != "" and not listed.strip().startswith("Z")


def test_share_of_unchecked_completions_and_parsed_texts_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = MathChecker(timeout=0.5)
    monkeypatch.setattr(maths, "_checker", checker)
    try:
        scores = RewardRunner(accuracy_reward).score(
            ["p"] * 4,
            [r"\boxed{3}", rf"\boxed{{{TOWER}}}", "none", r"\boxed{4}"],
            [[1]] * 4,
            {"solution": ["3", "3", "3", "no formula"]},
        )
    finally:
        checker.close()
    assert scores.by_name == {"accuracy_reward": [1.0, 0.0, 0.0, None]}
    assert scores.metrics == {"accuracy_reward/unchecked_fraction": 0.25}
    assert scores.extra == {"gold_parsed": ["3", "3", "3", None], "answer_parsed": ["3", None, None, None]}


def test_works_in_a_thread() -> None:
    # math-verify's own time-outs are signals, which only a main thread gets.
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.extend(accuracy_reward([r"\boxed{3}"], ["3"])))
    thread.start()
    thread.join()
    assert scores == [1.0]
