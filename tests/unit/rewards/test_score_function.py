"""Rewards from files, and functions in the form of verl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import RewardRunner
from prefrl.rewards.named import reward_by_name

FILE = """\
import dataclasses


@dataclasses.dataclass
class Found:
    score: float


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip() == ground_truth
    return Found(float(right)).score + (extra_info or {"bonus": 0})["bonus"] + (data_source == "hard")


def with_details(solution_str, ground_truth, **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str, "n": len(kwargs)}


def without_score(solution_str, ground_truth):
    return {"acc": 1.0}


def short(completions):
    return [-len(text) for text in completions]
"""
WRAPPED = [{"ground_truth": "4", "style": "rule"}, {"ground_truth": "6", "style": "rule"}]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Any]:
    folder = tmp_path / "of rewards: mine"
    folder.mkdir()
    (folder / "my.py").write_text(FILE)
    return lambda name: reward_by_name(f"{folder}/my.py:{name}")


def scores(reward: Any, columns: dict[str, list[Any]]) -> Any:
    return RewardRunner(reward).score(["2+2", "3+3"], [" 4", "5"], [[1], [2]], columns)


def test_a_function_of_a_file_is_a_reward(load: Callable[[str], Any]) -> None:
    assert scores(load("short"), {}).by_name == {"short": [-2.0, -1.0]}
    assert load("short") is load("short")  # a file is run once


def test_a_function_of_verl_is_called_for_each_completion(load: Callable[[str], Any]) -> None:
    columns: dict[str, list[Any]] = {"data_source": ["easy", "hard"], "reward_model": WRAPPED}
    assert scores(load("compute_score"), columns).by_name == {"compute_score": [1.0, 1.0]}
    columns["extra_info"] = [{"bonus": 0}, {"bonus": 0.5}]
    assert scores(load("compute_score"), columns).by_name == {"compute_score": [1.0, 1.5]}
    columns |= {"ground_truth": ["no", "5"], "extra_info": [None, None]}  # a column of this name wins
    assert scores(load("compute_score"), columns).by_name == {"compute_score": [0.0, 2.0]}


def test_messages_are_read_as_text(load: Callable[[str], Any]) -> None:
    answer = [[{"role": "assistant", "content": "4"}]]
    columns = {"data_source": ["a"], "ground_truth": ["4"]}
    assert RewardRunner(load("compute_score")).score(["2+2"], answer, [[1]], columns).by_name == {"compute_score": [1]}


def test_numbers_beside_a_score_are_logged(load: Callable[[str], Any]) -> None:
    logged: list[tuple[str, float]] = []
    reward = load("with_details")
    found = reward(
        completions=["4", "5"], log_metric=lambda *pair: logged.append(pair), ground_truth=["4", "4"], a=[1, 2]
    )
    assert found == [1.0, 0.0]
    assert logged == [("with_details/acc", 1.0), ("with_details/n", 2.0)] * 2  # n: the column and extra_info


def test_what_a_function_lacks_is_named(load: Callable[[str], Any]) -> None:
    with pytest.raises(RewardError, match="'with_details' needs a column 'ground_truth', or 'reward_model'"):
        scores(load("with_details"), {"reward_model": [{}, {}]})
    with pytest.raises(RewardError, match="a mapping needs the entry 'score'"):
        scores(load("without_score"), {"ground_truth": ["4", "6"]})
    with pytest.raises(ConfigError, match="needs 'data_source'"):
        RewardRunner(load("compute_score")).check_columns({"ground_truth"})


@pytest.mark.parametrize("name", ["./nowhere.py:f", "./nowhere:f", ".:f"])
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported.*module:function or folder/file.py:function"):
        reward_by_name(name)
