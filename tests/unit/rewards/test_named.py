"""Rewards from files, by path, of verl and of reasoning-gym."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.options.names import current_metric
from prefrl.rewards import ReasoningGym, RewardRunner, numeric_reward, reasoning_gym_dataset, register_reward
from prefrl.rewards.named import _REGISTERED, _RUNS_ANSWERS, named_rewards, reward_by_name
from prefrl.rewards.runner import reward_fingerprint
from prefrl.scripts.arguments.command import reward_entries, weighted_rewards

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


@pytest.mark.parametrize(
    ("given", "entries", "weights"),
    [
        (["numeric_reward", "b.py:f"], ["numeric_reward", "b.py:f"], None),
        (["numeric_reward=0.5", "b.py:f"], ["numeric_reward", "b.py:f"], [0.5, 1.0]),
        (["string_check(reference='a=2')"], ["string_check(reference='a=2')"], None),
        (["string_check(reference='a=2')=-1e-1"], ["string_check(reference='a=2')"], [-0.1]),
        ({"numeric_reward": 1, "f(x=2)": 0.5}, ["numeric_reward", "f(x=2)"], [1.0, 0.5]),
    ],
)
def test_an_entry_may_have_its_weight(given: Any, entries: list[str], weights: list[float] | None) -> None:
    assert weighted_rewards(given, None) == (entries, weights)


def test_weights_are_numbers_and_given_once() -> None:
    with pytest.raises(ConfigError, match=r"the weight of 'f' is \{'a': 1\}; it must be a number"):
        weighted_rewards({"f": {"a": 1}}, None)
    with pytest.raises(ConfigError, match=r"reward_weights=\[1.0\]: reward_funcs already gives weights"):
        weighted_rewards(["f=2"], [1.0])
    with pytest.raises(ConfigError, match="the weight of 'numeric_reward' is None"):
        RewardRunner({"numeric_reward": None, numeric_reward: 1.0})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="reward_funcs already gives each reward a weight"):
        RewardRunner({numeric_reward: 1.0}, weights=[1.0])


def test_a_mapping_gives_rewards_and_names_their_weights() -> None:
    runner = RewardRunner(named_rewards({"numeric_reward": 1.0, ReasoningGym: 0, "format_reward": 0.5}))
    assert (runner.names, runner.weights) == (["numeric_reward", "ReasoningGym", "format_reward"], [1.0, 0.0, 0.5])


@pytest.fixture
def registry() -> Iterator[None]:
    known = dict(_REGISTERED)
    yield
    _REGISTERED.clear()
    _REGISTERED.update(known)


REGISTERING = """\
from prefrl.rewards import register_reward


@register_reward("long_enough")
class _Length:
    def __init__(self, at_least=2):
        self.at_least = at_least

    def __call__(self, completions):
        return [float(len(text) >= self.at_least) for text in completions]
"""


@pytest.mark.usefixtures("registry")
def test_a_registered_reward_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REGISTERING)
    for name in (f"{tmp_path}/mine.py:long_enough", "long_enough(at_least=3)"):
        assert reward_by_name(name)(completions=["a", "ab", "abc"])[2] == 1.0
    runner = RewardRunner(named_rewards(["long_enough(at_least=3)", "numeric_reward"]))
    scores = runner.score(["", ""], ["ab", "abc"], [[1], [2]], {"answer": ["1", "1"]})
    assert scores.by_name == {"long_enough": [0.0, 1.0], "numeric_reward": [0.0, 0.0]}
    with pytest.raises(ConfigError, match="Did you mean 'long_enough'"):
        reward_by_name("long_enoug")


@pytest.mark.usefixtures("registry")
def test_a_name_is_registered_once() -> None:
    register_reward("mine")(numeric)
    register_reward("mine")(numeric)  # its module is loaded again
    for name, text in (("mine", "there is another"), ("numeric_reward", "there is another"), ("a.b", "identifier")):
        with pytest.raises(ConfigError, match=text):
            register_reward(name)(score)


def numeric(completions: list[str]) -> list[float]:
    """A reward."""
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("b", "B", 1.0),
        (" (B)", "B", 0.0),
        ("<think><answer>A</answer></think><answer> B </answer>", "B", 1.0),
        ("<answer>A</answer> no, <answer>B</answer>", "<answer>b</answer>", 1.0),
        ("<answer>A</answer>", "B", 0.0),
        ("A", None, None),
    ],
)
def test_a_single_choice_is_the_right_letter(completion: str, answer: str | None, value: float | None) -> None:
    assert reward_by_name("single_choice_reward")(completions=[completion], answer=[answer]) == [value]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward/numeric_reward", "rewards/numeric_reward/mean"),
        ("eval_completion_length", "eval_completions/mean_length"),
        ("eval_test_reward/f", "eval_test_rewards/f/mean"),
        ("rewards/f/mean", "rewards/f/mean"),
        ("reward", "reward"),
    ],
)
def test_old_names_of_metrics_mean_those_of_today(old: str, new: str) -> None:
    assert current_metric(old) == new


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

    with pytest.raises(RewardError, match=r"KeyError: 'here' \(line \d+ of .*test_named.py\)"):
        score(compute_score)


def test_another_function_is_another_reward() -> None:
    def one(solution_str: str, ground_truth: str) -> float:
        return 1.0

    def two(solution_str: str, ground_truth: str) -> float:
        return 2.0

    prints = [*RewardRunner([one, two]).fingerprints.values()]
    assert prints == [reward_fingerprint(one), reward_fingerprint(two)]
    assert prints[0] != prints[1]


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
