from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import (
    RewardRunner,
    accuracy_reward,
    get_cosine_scaled_reward,
    math_checker,
    reasoning_accuracy_reward,
)
from prefrl.rewards.math_checker import MathChecker, Verdict
from tests.patience import PATIENCE, before_a_deadline, wait_until

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


def test_the_answer_follows_the_last_of_the_first_delimiter_that_occurs() -> None:
    texts = [r"\boxed{2}<R>\boxed{1}<R>\boxed{3}", r"\boxed{3}<S>\boxed{4}<R>so", r"\boxed{3}</think>\boxed{3}"]
    assert reasoning_accuracy_reward(texts, ["3"] * 3, reasoning_delimiters=["<R>", "<S>"]) == [1.0, 0.0, 0.0]
    assert reasoning_accuracy_reward(texts, ["4"] * 3, ["<S>", "<R>"]) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("delimiters", ["</R>", [], ["</R>", ""], [3]])
def test_delimiters_of_the_reasoning_are_a_list_of_texts(delimiters: Any) -> None:
    with pytest.raises(ConfigError, match=r"reasoning_delimiters=.*must be a list of texts, such as \['</think>'\]"):
        reasoning_accuracy_reward(["x"], ["3"], reasoning_delimiters=delimiters)


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
        started.append(MathChecker(**{"timeout": PATIENCE, "budget": 10 * PATIENCE, "num_workers": 1, **options}))
        return started[-1]

    yield new
    for checker in started:
        checker.close()


def check(checker: MathChecker, text: str) -> Verdict:
    return checker.check([(text, "3")])[0]


def process_of(checker: MathChecker) -> subprocess.Popen[str]:
    """The process of its worker, which runs."""
    worker = checker._take()
    checker._idle.append(worker)
    return worker.running()


def test_worker_that_hangs_is_ended_at_the_deadline_and_replaced(
    new_checker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_checker, "_GRACE_S", PATIENCE)  # so that it is not killed before

    def attempt(seconds: float) -> tuple[MathChecker, subprocess.Popen[str], Verdict] | None:
        caplog.clear()
        checker = new_checker(timeout=seconds)
        process = process_of(checker)
        verdict = check(checker, rf"\boxed{{{TOWER}}}")
        return None if verdict.gold is None else (checker, process, verdict)

    with caplog.at_level(logging.WARNING):
        checker, process, verdict = before_a_deadline(attempt)
    assert verdict == Verdict("3", is_checked=False)
    assert "the completion scores 0" in caplog.text
    assert process.returncode == -signal.SIGALRM, "it did not end itself"  # and is no zombie
    checker._workers[0].timeout = PATIENCE
    assert check(checker, r"\boxed{3}").is_correct


def test_worker_killed_between_questions_is_replaced(new_checker: Any) -> None:
    checker = new_checker()
    process_of(checker).kill()
    process_of(checker).wait()
    assert check(checker, r"\boxed{3}").is_correct


@pytest.mark.parametrize("length", [1, 10**6], ids=["short", "longer than the pipe"])
def test_worker_that_is_stopped_is_killed_and_replaced(
    length: int, new_checker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_checker, "_GRACE_S", 0.1)
    checker = new_checker()
    process_of(checker).send_signal(signal.SIGSTOP)
    checker._workers[0].timeout = 0.2
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(check(checker, "x" * length)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert verdicts == [Verdict(None, is_checked=False)]
    checker._workers[0].timeout = PATIENCE
    assert check(checker, r"\boxed{3}").is_correct


def test_endless_answers_share_a_budget(new_checker: Any, caplog: pytest.LogCaptureFixture) -> None:
    def attempt(seconds: float) -> tuple[float, list[Verdict]] | None:
        checker = new_checker(timeout=seconds, budget=seconds)
        verdicts = checker.check([(rf"\boxed{{{TOWER}}}", "3")] * 3 + [(r"\boxed{3}", "3")])
        return (seconds, verdicts) if verdicts[0].gold is not None else None

    seconds, verdicts = before_a_deadline(attempt)
    assert verdicts == [Verdict("3", is_checked=False)] + [Verdict(None, is_checked=False)] * 3
    assert f"3 of 4 completions were not checked within {seconds} s" in caplog.text


def test_others_are_checked_while_an_endless_answer_runs(new_checker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = new_checker(num_workers=2)
    check_one = math_checker._Worker.check
    done: list[Verdict] = []

    def end_the_endless_one_last(worker: Any, text: str, gold: str) -> Verdict:
        done.append(check_one(worker, text, gold))
        if len(done) == 4:
            (other,) = (each for each in checker._workers if each is not worker)
            other.process.kill()
        return done[-1]

    monkeypatch.setattr(math_checker._Worker, "check", end_the_endless_one_last)
    verdicts = checker.check([(rf"\boxed{{{TOWER}}}", "3")] + [(r"\boxed{3}", "3"), (r"\boxed{4}", "3")] * 2)
    assert [verdict.is_checked for verdict in verdicts] == [False, True, True, True, True]
    assert [verdict.is_correct for verdict in verdicts] == [False, True, False, True, False]
    assert len(checker._workers) == 2


def test_worker_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import os; from prefrl.rewards.maths import _checker;"
        "print(_checker._take().running().pid, flush=True); os._exit(0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    pid = int(run.stdout)
    assert wait_until(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return listed.strip() != "" and not listed.strip().startswith("Z")


def test_share_of_unchecked_completions_and_parsed_texts_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    check_one = math_checker._Worker.check

    def give_up_the_tower(worker: Any, text: str, gold: str) -> Verdict:
        return Verdict(gold, is_checked=False) if TOWER in text else check_one(worker, text, gold)

    monkeypatch.setattr(math_checker._Worker, "check", give_up_the_tower)
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
