"""Rewards for code: which block is run, what the score is, and what is an error rather than a score."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import LocalSandbox, RewardRunner, get_code_reward
from prefrl.rewards.code import last_code_block
from prefrl.rewards.sandbox import AssertionTest, InputOutputTest, SandboxError, Verdict

DOUBLE = "```python\nprint(2 * int(input()))\n```"


@dataclass
class Scripted:
    """A sandbox in which code is a table of the tests that it passes; `sleep` takes half a second."""

    seen: list[str] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)

    def setup(self) -> None:
        raise ConfigError("no sandbox here")

    def check(self, language: str, code: str, test: InputOutputTest | AssertionTest) -> Verdict:
        name = test.input if isinstance(test, InputOutputTest) else test.code
        self.num_running.append(sum(thread.name == "code tests" for thread in threading.enumerate()))
        self.seen.append(name)
        if "sleep" in code:
            time.sleep(0.5)
        if "broken" in code:
            raise SandboxError("sandbox: no room")
        return Verdict(True) if name in code.split() else Verdict(False, f"not {name}", "bad" if name == "?" else None)


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


def test_tests_run_concurrently_and_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Scripted()
    with caplog.at_level(logging.WARNING):
        found = scores([block("sleep a b")] * 4, [cases("a", "b")] * 4, budget=0.3, num_workers=3, sandbox=sandbox)
    assert found == [1.0, None, None, None]  # three of eight tests were begun
    assert max(sandbox.num_running) == 3
    assert "5 of 8 tests were not run within budget=0.3 s" in caplog.text


def test_a_known_failure_needs_no_more_tests() -> None:
    found = scores([block("sleep b")], [cases("a", "b")], budget=0.3, num_workers=1, all_or_nothing=True)
    assert found == [0.0]


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
        ("test_code", "?", r"code_reward, row 0, test 0 cannot judge completions: bad"),
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
