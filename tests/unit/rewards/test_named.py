"""Rewards from files, by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import RewardRunner
from prefrl.rewards.named import reward_by_name
from prefrl.scripts.arguments.command import reward_entries

FILE = """\
import dataclasses


@dataclasses.dataclass
class Length:
    value: int


def short(completions):
    return [-Length(len(text)).value for text in completions]
"""


def test_a_function_of_a_file_is_a_reward(tmp_path: Path) -> None:
    folder = tmp_path / "mine: rewards"
    folder.mkdir()
    (folder / "short.py").write_text(FILE, encoding="utf-8")
    reward = reward_by_name(f"{folder}/short.py:short")
    assert RewardRunner(reward).score(["a", "b"], [" 4", "5"], [[1], [2]], {}).by_name == {"short": [-2.0, -1.0]}
    assert reward_by_name(f"{folder}/short.py:short") is reward  # a file is run once
    with pytest.raises(ConfigError, match=r"short\.py has no 'shorter'\. Did you mean 'short'"):
        reward_by_name(f"{folder}/short.py:shorter")


def test_a_built_in_name_in_python_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"from prefrl\.rewards import numeric_reward"):
        RewardRunner("numeric_reward")


@pytest.mark.parametrize("name", ["./nowhere.py:f", "./nowhere:f", ".:f"])
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported.*module\.function or folder/file\.py:function"):
        reward_by_name(name)


PARAMETERS = """\
def near(completions, answer, tolerance=0.5, **_):
    return [float(abs(float(text) - float(gold)) <= tolerance) for text, gold in zip(completions, answer)]


class Scaled:
    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, completions, **_):
        return [self.factor * len(text) for text in completions]
"""


def test_functions_and_classes_take_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "near_rewards", raising=False)
    (tmp_path / "near_rewards.py").write_text(PARAMETERS, encoding="utf-8")
    names = ["near_rewards.near", "near_rewards:near(tolerance=0.1)", "near_rewards.py:near(tolerance=2)"]
    names += ["near_rewards.Scaled", "near_rewards.py:Scaled(factor=-0.5)"]
    rewards = [reward_by_name(name) for name in names]
    scores = RewardRunner(rewards).score(["a"], ["3.2"], [[1]], {"answer": ["3"]}).by_name
    assert scores == {"near": [1.0], "near_2": [0.0], "near_3": [1.0], "Scaled": [3.0], "Scaled_2": [-1.5]}


def test_built_in_rewards_that_are_made_are_named_with_their_parameters() -> None:
    rewards = [
        reward_by_name("repetition_penalty_reward(ngram_size=1, max_penalty=-4)"),
        reward_by_name("length_reward(target_len=4)"),
        reward_by_name("soft_overlong_punishment_reward(max_completion_len=6, soft_punish_cache=4)"),
    ]
    scores = RewardRunner(rewards).score(["a"], ["x"], [[7, 7, 7, 7]], {}).by_name
    assert [*scores.values()] == [[-3.0], [1.0], [-0.5]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accuracy_reward(tolerance=0.1)", "accuracy_reward has no parameter 'tolerance'"),
        ("format_reward(completions=[])", "format_reward has no parameter 'completions'"),
        ("length_reward(size=4)", "unexpected keyword argument 'size'"),
        ("length_reward", "the grader length_reward needs its parameters"),
        ("rewards.py", "is neither a built-in reward nor module:function, module.function or folder/file.py:function"),
        ("nowhere.at.all", "cannot be imported: No module named 'nowhere'"),
        ("nowhere.py:f(x=1", "cannot be read"),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_by_name(name)


def test_a_mapping_is_the_text_of_the_command_line() -> None:
    entry = {"name": "my.py:f", "a": 0.1, "b": "it's", "c": [-1, None], "d": {"e": True}}
    texts = reward_entries(["numeric_reward", entry, {"name": "g"}])
    assert texts == ["numeric_reward", """my.py:f(a=0.1, b="it's", c=[-1, None], d={'e': True})""", "g"]
    for wrong in ({"a": 1}, 3, {"name": "f(a=1)", "b": 2}, {"name": "f", "not a name": 2}):
        with pytest.raises(ConfigError, match=r"reward_funcs\[1\]="):
            reward_entries(["numeric_reward", wrong])  # type: ignore[list-item]
