"""Rewards for code: which block is run, what the score is, and what is an error rather than a score."""

from __future__ import annotations

import logging
import pickle
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import LocalSandbox, RewardRunner, base, get_code_reward
from prefrl.rewards import code as code_module
from prefrl.rewards.code import last_code_block
from prefrl.sandbox import AssertionTest, InputOutputTest, SandboxError, Verdict
from tests.patience import PATIENCE

DOUBLE = "```python\nprint(2 * int(input()))\n```"


@dataclass
class Scripted:
    """A sandbox in which code is a table of the tests that it passes; `sleep` takes ten seconds of its own clock."""

    seen: list[str] = field(default_factory=list)
    now: float = 0.0
    company: threading.Barrier = field(default_factory=lambda: threading.Barrier(3))

    def setup(self) -> None:
        raise ConfigError("no sandbox here")

    def check(self, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        name = test.input if isinstance(test, InputOutputTest) else test.code
        self.seen.append(name)
        if "sleep" in code:
            self.now += 10.0
        if "together" in code:
            self.company.wait(PATIENCE)
        if "broken" in code:
            raise SandboxError("sandbox: no room")
        if name in code.split():
            return Verdict(True)
        doubt = "odd" if "odd" in code else None
        return Verdict(False, f"not {name}", defect="bad" if name == "?" else None, doubt=doubt)


def scores(completions: list[str], tests: Any, column: str = "test_cases", **options: Any) -> list[float | None]:
    reward = get_code_reward(column, **{"sandbox": Scripted(), **options})  # type: ignore[arg-type]
    return list(reward(completions=completions, **{column: tests}))


def cases(*names: str) -> list[dict[str, str]]:
    return [{"input": name, "output": "x"} for name in names]


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("So:\n```python\na\n```\nor\n```py\nb\n```\nwith\n```\noutput\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```bash\nls\n```", None),
        ("```Python title='x'\na\n\n b\n```", "a\n\n b\n"),
        ("~~~python\n```\na\n~~~", "```\na\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("a = 1", None),
        ("Use `print(1)` or ```x```.", None),
        ("```python\n```", ""),
        ("<think>```python\nb\n```</think>\n```python\na\n```", "a\n"),
        ("<think>\n```python\nb\n```\n</think>\nDone.", None),
        ("<think>\n```python\nb\n```\n", None),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\na = '\u2028\x1c\x0b'\n```", "a = '\u2028\x1c\x0b'\n"),
        ("```python\r\na\r\n```", "a\n"),
    ],
)
def test_the_last_closed_block_of_the_language_is_the_code(text: str, code: str | None) -> None:
    assert last_code_block(text, "python") == code


def test_the_language_is_the_one_that_was_asked_for() -> None:
    assert last_code_block("```sh\nls\n```\n```python\na\n```", "bash") == "ls\n"


def test_the_score_is_the_share_of_tests_passed_or_all_of_them() -> None:
    completions = [block("a b c d"), block("a c"), block("x"), "no code"]
    tests = [cases("a", "b", "c", "d")] * 4
    assert scores(completions, tests) == [1.0, 0.5, 0.0, 0.0]
    assert scores(completions, tests, all_or_nothing=True) == [1.0, 0.0, 0.0, 0.0]


def test_after_a_failure_that_decides_no_more_tests_run() -> None:
    sandbox = Scripted()
    assert scores([block("b c")], [cases("a", "b", "c")], all_or_nothing=True, sandbox=sandbox, num_workers=1) == [0.0]
    assert sandbox.seen == ["a"]


def test_rows_without_tests_have_no_score() -> None:
    assert scores([block("a")] * 3, [None, [], cases("a")]) == [None, None, 1.0]
    assert scores([block("a")] * 4, [None, [], "a", ["a", "b"]], "test_code") == [None, None, 1.0, 0.5]


def test_tests_run_concurrently() -> None:
    assert scores([block("together a")] * 3, [cases("a")] * 3, num_workers=3) == [1.0] * 3


@pytest.fixture
def slow_sandbox(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    sandbox = Scripted()
    for module in (base, code_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: sandbox.now))
    return sandbox


def test_a_budget_that_is_too_small_leaves_completions_without_a_score(
    slow_sandbox: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"sandbox": slow_sandbox, "num_workers": 1, "budget": 25.0}
    with caplog.at_level(logging.WARNING):
        assert scores([block("sleep a b")] * 3, [cases("a", "b")] * 3, **options) == [1.0, None, None]
    assert "3 of 6 tests were not run within budget=25.0 s" in caplog.text


def test_a_completion_that_sleeps_scores_zero_and_takes_no_time_of_others(slow_sandbox: Scripted) -> None:
    options: dict[str, Any] = {"sandbox": slow_sandbox, "num_workers": 1, "budget": 35.0}
    completions = [block("sleep"), block("sleep a"), block("a b c"), block("c")]
    assert scores(completions, [cases("a", "b", "c")] * 4, **options) == [0.0, 1 / 3, 1.0, 1 / 3]
    assert "".join(slow_sandbox.seen) == "aab" + "abc" * 2 + "b"
    slow_sandbox.now = 0.0
    assert scores(completions[:2], [cases("a", "b", "c")] * 2, **options, all_or_nothing=True) == [0.0, 0.0]


def test_a_completion_that_sleeps_holds_up_one_worker_at_a_time() -> None:
    """The two that run together with the first test of the first completion are those of others."""
    completions = [block("together a b"), block("together a b"), block("together a b")]
    sandbox = Scripted()
    assert scores(completions, [cases("a", "b")] * 3, num_workers=3, sandbox=sandbox) == [1.0] * 3
    assert sandbox.seen[:3] == ["a"] * 3


@pytest.mark.parametrize(
    ("codes", "found", "num_told"),
    [
        (["odd b", "odd b", "odd"], [0.5, 0.5, 0.0], 1),
        (["odd b", "wrong"], [0.5, 0.0], 0),
        (["odd b", "a b"], [0.5, 1.0], 0),
        (["odd b"], [0.5], 0),
    ],
)
def test_a_doubt_that_all_completions_of_a_row_raise_is_told_once_and_ends_nothing(
    codes: list[str], found: list[float], num_told: int, caplog: pytest.LogCaptureFixture
) -> None:
    code_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert scores(list(map(block, codes)), [["a", "b"]] * len(codes), "test_code") == found
    assert [record.getMessage().count("The test is 'a'") for record in caplog.records] == [1] * num_told


def test_verdicts_and_shares_are_logged() -> None:
    reward = get_code_reward(sandbox=Scripted(), num_workers=1)
    result = RewardRunner(reward_without_setup(reward)).score(
        ["p"] * 4,
        [block("a"), block("a b"), "no code", block("a")],
        [[1]] * 4,
        {"test_cases": [cases("a", "b", "c"), cases("a", "b"), cases("a"), None]},
    )
    assert result.by_name == {"code_reward": [1 / 3, 1.0, 0.0, None]}
    assert result.metrics == {"code_reward/no_code_fraction": 1 / 3, "code_reward/unchecked_fraction": 0.0}
    assert result.extra == {"code_verdict": ["passed; not b; not c", "passed", "no code", None]}


def reward_without_setup(reward: Any) -> Any:
    object.__setattr__(reward.sandbox, "setup", lambda: None)
    return reward


def test_a_sandbox_that_fails_is_an_error_and_no_score() -> None:
    with pytest.raises(RewardError, match="no room"):
        scores([block("a"), block("broken a")], [cases("a"), cases("a")])


def test_a_sandbox_that_does_not_work_is_an_error_before_training() -> None:
    with pytest.raises(ConfigError, match="no sandbox here"):
        RewardRunner(get_code_reward(sandbox=Scripted()))


def test_the_column_is_needed_before_training() -> None:
    for column in ("test_cases", "test_code"):
        reward = reward_without_setup(get_code_reward(column, sandbox=Scripted()))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=column):
            RewardRunner(reward, columns=["prompt"])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("test_cases", "1 2", "column 'test_cases', row 0: '1 2'; allowed is a list"),
        ("test_cases", [{"input": "1"}], "row 0: {'input': '1'}; allowed is a list"),
        ("test_cases", [{"input": 1, "output": 2}], "row 0: {'input': 1, 'output': 2}"),
        ("test_code", [1], "column 'test_code', row 0: .*allowed is a text of Python code"),
        ("test_code", "?", r"row 0 of the batch: test 0 cannot judge any completion: bad\. .*The test is '\?'"),
    ],
)
def test_columns_that_are_no_tests(column: str, value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        scores([block("a")], [value], column)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tests": "cases"}, "tests='cases': allowed are 'test_cases', 'test_code'"),
        ({"language": "rust"}, "language='rust': allowed are 'python', 'bash'"),
        ({"tests": "test_code", "language": "bash"}, "tests by assertions are in Python"),
        ({"budget": 0}, "budget=0: needs to be > 0"),
        ({"num_workers": 0}, "num_workers=0: needs to be >= 1"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_code_reward(**options)


def test_rewards_can_be_pickled() -> None:
    reward = get_code_reward("test_code", sandbox=LocalSandbox("process"))
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_real_code_is_run() -> None:
    sandbox = LocalSandbox("process")
    tests = [{"input": "1\n", "output": "2\n"}, {"input": "20", "output": "40"}]
    wrong = block("print(2)")
    assert scores([DOUBLE, wrong, "2"], [tests] * 3, sandbox=sandbox) == [1.0, 0.5, 0.0]
    found = scores(
        [block("def f(x): return x")] * 2, ["assert f(1) == 1", ["assert f(1) == 2"]], "test_code", sandbox=sandbox
    )
    assert found == [1.0, 0.0]
