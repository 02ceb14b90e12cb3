"""Scoring functions of verl are rewards as they are."""

from __future__ import annotations

from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import RewardRunner
from prefrl.rewards.runner import reward_fingerprint

ROWS = {
    "data_source": ["sums", "words"],
    "reward_model": [{"style": "rule", "ground_truth": "2"}, {"ground_truth": "b"}],
    "extra_info": [{"index": 0}, {"index": 1}],
}
CHAT = [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "a"}]]


def score(function: Any, columns: dict[str, Any] = ROWS, completions: Any = CHAT) -> Any:
    prompts = [[{"role": "user", "content": "?"}]] * 2
    return RewardRunner(function).score(prompts, completions, [[1], [2]], columns)


def test_it_gets_verls_arguments_for_each_completion() -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    assert score(compute_score).by_name == {"compute_score": [1.0, 0.0]}
    assert seen == [("sums", "2", "2", {"index": 0}), ("words", "a", "b", {"index": 1})]


def test_a_mapping_gives_the_score_and_columns_of_the_table() -> None:
    def compute_score(solution_str: str, ground_truth: str, **_: Any) -> Any:
        return {"score": -1.0, "acc": False} if solution_str == "a" else {"score": 1.0, "pred": solution_str}

    scores = score(compute_score)
    assert scores.by_name == {"compute_score": [1.0, -1.0]}
    assert scores.extra == {"acc": [None, False], "pred": ["2", None]}


def test_columns_that_are_not_there_are_none() -> None:
    def compute_score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return float(data_source is None and extra_info is None)

    columns = {"reward_model": ROWS["reward_model"]}
    assert score(compute_score, columns).by_name == {"compute_score": [1.0, 1.0]}


def test_the_ground_truth_may_be_a_column() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    assert score(compute_score, {"ground_truth": ["1", "a"]}).by_name == {"compute_score": [0.0, 1.0]}


def test_what_is_missing_is_told() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> Any:
        return {"reward": 1.0}

    with pytest.raises(ConfigError, match=r"'compute_score' needs the column 'ground_truth', or 'reward_model'"):
        RewardRunner(compute_score, columns=["data_source"])
    with pytest.raises(RewardError, match=r"row 1: reward_model is \{'style': 'rule'\}.*'ground_truth'"):
        score(compute_score, {"reward_model": [{"ground_truth": "2"}, {"style": "rule"}]})
    with pytest.raises(RewardError, match=r"row 0: returned \{'reward': 1.0\}; it needs the key 'score'"):
        score(compute_score)


def test_an_error_names_the_users_line() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        raise KeyError("here")

    with pytest.raises(RewardError, match=r"KeyError: 'here' \(line \d+ of .*test_compute_score.py\)"):
        score(compute_score)


def test_another_function_is_another_reward() -> None:
    def one(solution_str: str, ground_truth: str) -> float:
        return 1.0

    def two(solution_str: str, ground_truth: str) -> float:
        return 2.0

    prints = [*RewardRunner([one, two]).fingerprints.values()]
    assert prints == [reward_fingerprint(one), reward_fingerprint(two)]
    assert prints[0] != prints[1]
