"""Answers in texts, and whether they are equal."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import (
    RewardRunner,
    accuracy_reward,
    get_cosine_scaled_reward,
    get_numeric_reward,
    math_checker,
    numeric_reward,
    reasoning_accuracy_reward,
)
from prefrl.rewards.math_checker import MathChecker, Verdict
from prefrl.rewards.maths import final_number, only_number
from prefrl.rewards.named import reward_by_name
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # where the answer stands
        ("He has 3 + 4 = 7 apples\n#### 7", "7"),
        ("#### 7\nThat is 7 of 10 apples.", "7"),
        ("#### **7**", "7"),
        (r"first \boxed{6}, no: \boxed{7} of 9", "7"),
        (r"#### 6" "\n" r"\boxed{7}", "7"),
        ("<answer> 7 </answer> of 9", "7"),
        ("There were 5, then 7. He has 9 more.", "9"),
        ("<think>maybe 6</think> It is 7.", "7"),
        ("#### Step 2: add 3 and 4\nThe sum is 7.", "7"),
        # how it is written
        ("#### 1,234,567", "1234567"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \u22125", "-5"),
        ("it is .5", "1/2"),
        ("It is 5.", "5"),
        ("10-3", "3"),
        ("3/4", "3/4"),
        ("2 1/2 hours", "5/2"),
        ("on day 3 14/2", "7"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4"),
        (r"\boxed{\frac34}", "3/4"),
        (r"\boxed{2\frac{1}{2}}", "5/2"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{1\,000}", "1000"),
        (r"\boxed{\$72}", "72"),
        (r"\boxed{72\text{ cm}^2}", "72"),
        (r"\boxed{x = 72}", "72"),
        (r"\boxed{\text{72}}", "72"),
        ("#### 72 apples", "72"),
        ("#### 1e5", "100000"),
        ("#### -2.5E-1.", "-1/4"),
        ("It is 72!", "72"),
        ("#### 72 km/h, as said", "72"),
    ],
)
def test_final_number_is_read(text: str, value: str) -> None:
    number = final_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "no number",
        "",
        "#### 1 2 3 4",  # all of them, in the hope that one is right
        r"\boxed{3, 4}",
        r"\boxed{x}, and 7",
        r"\boxed{7",
        "<answer>7",
        r"\boxed{5\pi}",
        r"\boxed{10^5}",
        r"\boxed{\frac{1}{0}}",
        "#### 7,7,7,7",
        "#### 7/1/1",
        "#### 7 / 1 / 1",
        "#### 7!",
        "#### 7x10",
        "#### 7x",
        "#### 7.0.0",
        "#### 7,00",
        "#### 7e0.5",
        "#### 7e0000",
        "#### 7e",
        "on 7/7/2027",
        "<think>it is 7",
        "7" * 5000,  # int() refuses it
    ],
)
def test_what_is_no_single_number_has_no_answer(text: str) -> None:
    assert final_number(text) is None
    assert numeric_reward([text], [7]) == [0.0]


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("72", "72", 1.0),
        ("72", "72.0", 1.0),
        ("72", "7", 0.0),
        ("72", "720", 0.0),
        ("5,600", "A: 5600", 1.0),
        ("1/3", r"\boxed{\frac{2}{6}}", 1.0),
        ("1/3", "0.333333", 0.0),
        ("She has 3 and 4.\n#### 7", "7", 1.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5", 1.0),
        ("50", "50%", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "0.5", 0.0),
        ("50%", "0.5%", 0.0),
        (0.1, "0.1", 1.0),
        (72, "72", 1.0),
        (-3, "3", 0.0),
        ("seventy", "70", None),
        ("3 or 4", "3", None),
        (None, "3", None),
        (float("nan"), "3", None),
    ],
)
def test_equal_as_exact_numbers(gold: str | float | None, text: str, score: float | None) -> None:
    assert numeric_reward([text], [gold]) == [score]
    assert numeric_reward(completions=[[{"role": "assistant", "content": text}]], answer=[gold], level=[1]) == [score]


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("0.5", "0.6", 1.0),  # a difference of exactly the tolerance, which binary numbers would miss
        ("0.5", "0.4", 1.0),
        ("0.5", "0.61", 0.0),
        ("0.5", "none", 0.0),
        ("1/3", "0.333", 1.0),
        ("50%", "50.2%", 0.0),  # the tolerance is in percent, too
        ("50%", "0.55", 1.0),
        ("half", "0.5", None),
    ],
)
def test_a_number_within_the_tolerance_is_right(gold: str, text: str, score: float | None) -> None:
    assert get_numeric_reward(tolerance=0.1)([text], [gold]) == [score]


def test_the_tolerance_is_a_parameter_of_the_reward() -> None:
    reward = reward_by_name("numeric_reward(tolerance=2)")
    assert [reward(["7"], [answer]) for answer in ("5", "9.5")] == [[1.0], [0.0]]
    assert RewardRunner([numeric_reward, reward]).names == ["numeric_reward", "numeric_reward_2"]
    for wrong in ("-1", "float('nan')", "1e999"):
        with pytest.raises(ConfigError):
            reward_by_name(f"numeric_reward(tolerance={wrong})")


# Solutions that models wrote for GSM8K, with the dataset's own verdict.
GSM8K = [
    ("5,600", "<<1000*4=4000>>4000 and $<<1600+4000=5600>>5600.\nA: 5600", True),
    ("3000", "60 x 50 = $<<60*50=3000>>3,000.\nA: 3,000", True),
    (
        "18",
        "She has 16 - 7 = <<16-7=9>>9 duck eggs for sale\nShe sells them for 2 * 9 = $<<2*9=18>>18 per day\nA: 18",
        True,
    ),
    ("3", "So she needs 2+1 = <<2+1=3>>3.0 bolts of blue and white fiber altogether.\nA: 3", True),
    ("18", "She makes 13 * 2 = $<<13*2=26>>26\nA: 26", False),
    ("4", "The length of each piece is 4 feet / 12 inches/foot = <<4/12=0.3333333333333333>>0." + "3" * 1200, False),
]


@pytest.mark.parametrize(("gold", "solution", "is_correct"), GSM8K)
def test_agrees_with_the_labels_of_gsm8k(gold: str, solution: str, is_correct: bool) -> None:
    assert numeric_reward([solution], [f"Some reasoning about 99 things.\n#### {gold}"]) == [float(is_correct)]


def test_several_equal_numbers_are_one() -> None:
    assert only_number("72 = 72.0") is not None
    assert only_number("72 = 73") is None
