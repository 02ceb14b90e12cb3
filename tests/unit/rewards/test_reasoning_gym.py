"""Rewards that tasks of reasoning-gym give."""

from __future__ import annotations

import inspect
import pickle
import re
import sys

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import ReasoningGym, RewardRunner, reasoning_gym_dataset
from prefrl.rewards.named import _RUNS_ANSWERS, reward_by_name


def test_the_reward_of_a_name_is_the_score_of_the_task() -> None:
    rows = reasoning_gym_dataset("chain_sum", size=2, seed=1, max_terms=3)
    reward = reward_by_name("reasoning_gym:chain_sum")
    right = rows["answer"][0]
    said = [
        f"<think><answer>{right}</answer></think>I say <answer> {right}.0 </answer>.",
        right,
        "no idea",
        f"{right}0",
    ]
    columns = {name: [rows[name][0]] * 4 for name in ("answer", "metadata")}
    scores = RewardRunner(reward).score([rows["prompt"][0]] * 4, said, [[1]] * 4, columns)
    partly = len(right) / (len(right) + 1)  # the answer stands in a longer text
    assert scores.by_name["chain_sum"] == [1.0, 1.0, 0.0, pytest.approx(partly)]
    assert pickle.loads(pickle.dumps(reward))(said[1:2], [right], rows["metadata"][:1]) == [1.0]


def test_rows_depend_on_the_seed_alone() -> None:
    first, again = (reasoning_gym_dataset("leg_counting", size=3, seed=5) for _ in range(2))
    assert first.to_list() == again.to_list()
    assert first.to_list() != reasoning_gym_dataset("leg_counting", size=3, seed=6).to_list()
    assert first.column_names == ["prompt", "answer", "metadata"]


@pytest.mark.parametrize("task", ["arc_agi", "kakurasu"])  # the one compares tuples, the other lists
def test_metadata_keeps_tuples_and_lists(task: str) -> None:
    (row,) = reasoning_gym_dataset(task, size=1, seed=1).to_list()
    assert ReasoningGym(task)([row["answer"]], [row["answer"]], [row["metadata"]]) == [1.0]


def test_rows_of_other_tasks_have_no_reward_and_unreadable_answers_score_0() -> None:
    sums = reasoning_gym_dataset("chain_sum", size=1, seed=1)
    factors = reasoning_gym_dataset("prime_factorization", size=1, seed=1)
    reward = ReasoningGym("prime_factorization")
    rows = {name: [*sums[name], *factors[name], *factors[name]] for name in ("answer", "metadata")}
    assert reward(["1", "x", factors["answer"][0]], **rows) == [None, 0.0, 1.0]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reasoning_gym:chain_sums: is no task. Did you mean 'chain_sum'\?"):
        reward_by_name("reasoning_gym:chain_sums")
    with pytest.raises(ConfigError, match=r"reasoning_gym:composite: is no task"):
        reasoning_gym_dataset("composite", size=1, seed=1)
    with pytest.raises(ConfigError, match=r"reasoning_gym:chain_sum with \{'terms': 3\}: .*terms"):
        reasoning_gym_dataset("chain_sum", size=1, seed=1, terms=3)
    with pytest.raises(RewardError, match=r"column 'metadata' has 'null'"):
        ReasoningGym("chain_sum")(["1"], ["1"], ["null"])


def test_tasks_that_run_answers_as_code_are_refused() -> None:
    from reasoning_gym.factory import DATASETS

    runs = re.compile(r"(?:\beval|parse_expr)\(answer")
    found = [name for name, (cls, _) in DATASETS.items() if runs.search(inspect.getsource(inspect.getmodule(cls)))]
    assert sorted(found) == sorted(_RUNS_ANSWERS)
    for task in _RUNS_ANSWERS:
        with pytest.raises(ConfigError, match=f"reasoning_gym:{task}: this task runs answers as Python code"):
            ReasoningGym(task)


def test_without_the_package_a_run_ends_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"prefrl\[reasoning-gym\]"):
        reward_by_name("reasoning_gym:chain_sum")
