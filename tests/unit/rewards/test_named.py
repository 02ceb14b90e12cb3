"""Rewards from files, by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import RewardRunner
from prefrl.rewards.named import reward_by_name

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
    with pytest.raises(ConfigError, match="is a file"):
        reward_by_name(f"{folder}/short.py")


def test_a_function_of_a_module_is_named_with_a_colon_or_a_dot() -> None:
    assert reward_by_name("prefrl.rewards.numeric_reward") is reward_by_name("prefrl.rewards:numeric_reward")


def test_a_built_in_name_in_python_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"from prefrl\.rewards import numeric_reward"):
        RewardRunner("numeric_reward")


@pytest.mark.parametrize("name", ["./nowhere.py:f", "./nowhere:f", ".:f"])
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported.*module:function or folder/file.py:function"):
        reward_by_name(name)
