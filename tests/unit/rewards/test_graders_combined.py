"""Formulas, gates, and graders by name."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import BySource, Combined, PythonGrader, RewardRunner, StringCheck, numeric_reward
from prefrl.rewards.graders.combined import Formula
from prefrl.rewards.named import reward_by_name
from prefrl.rewards.runner import reward_fingerprint
from prefrl.scripts.arguments.command import RewardEntry

X = {"x": 0.5, "y": -2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7 * x + 0.3 * max(y, 0.2)", 0.41),
        ("x - y - 1", 1.5),
        ("-x / +y", 0.25),
        ("abs(y) * (x + 1)", 3.0),
        ("min(x, y, 3)", -2.0),
        ("max(x)", 0.5),
        ("(x >= 0.5) + (y > 0) * 10", 1.0),
        ("2 * (x < 1)", 2.0),
        ("-3 < y < x", 1.0),
        ("-3 < y < -2", 0.0),
        ("(x == 0.5) + (x != 0.5) + (x <= 0.4)", 1.0),
        ("\n x\n", 0.5),
    ],
)
def test_a_formula_has_the_value_worked_out_by_hand(text: str, value: float) -> None:
    assert Formula(text, X).value(X) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "x.real",
        "x[0]",
        "(lambda: x)()",
        "[x for x in (1,)]",
        "'a' * 9",
        "x ** 9",
        "x // 2",
        "x and y",
        "not x",
        "x if y else 1",
        "x in y",
        "True",
        "None",
        "1j",
        "1e999",
        "9" * 400,
        "9" * 1999,
        "max(x, key=abs)",
        "max(*x)",
        "max()",
        "abs(x, y)",
        "eval(x)",
        "x := 1",
        "f'{x}'",
        "x; y",
        "",
        "x +",
        "(" * 300 + "x" + ")" * 300,
        "-" * 1990 + "x",
        "x" + "+x" * 999,
        "max(x" + ", x" * 300 + ")",
        "x" * 2001,
        "z",
    ],
)
def test_a_formula_with_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="formula="):
        Formula(text, X)


def test_a_name_that_is_no_grader_is_corrected() -> None:
    with pytest.raises(ConfigError, match=r"'corect' is not one of the graders\. Did you mean 'correct'"):
        Formula("corect", ["correct", "style"])


# Several graders.


class Counted:
    """A reward from a column, which remembers how many rows it was given each time."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.asked: list[int] = []

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[Any]:
        self.asked.append(len(completions))
        return columns[self.column]


def combined(count: int, grader: Combined, **columns: list[Any]) -> Any:
    texts = [f"text {i}" for i in range(count)]
    return RewardRunner(grader).score(["p"] * count, texts, [[i] for i in range(count)], columns)


def test_a_combination_is_its_formula_row_by_row_and_logs_its_parts() -> None:
    grader = Combined(
        {"correct": Counted("a"), "style": Counted("b")}, formula="0.7 * correct + 0.3 * max(style, 0.2)", name="both"
    )
    scores = combined(3, grader, a=[1, 0, 1], b=[0, 1, None])
    assert scores.by_name == {"both": [pytest.approx(0.76), pytest.approx(0.3), None]}
    assert scores.metrics == {"both/correct": pytest.approx(2 / 3), "both/style": 0.5}


def test_weights_sum_what_applies() -> None:
    parts = {"a": Counted("a"), "b": Counted("b")}
    columns: dict[str, list[Any]] = {"a": [1, None, None], "b": [1, 1, None]}
    assert combined(3, Combined(parts), **columns).by_name["combined"] == [2.0, 1.0, None]
    weighted = Combined(parts, weights={"b": 0.5, "a": 2})
    assert combined(3, weighted, **columns).by_name["combined"] == [2.5, 0.5, None]


def test_behind_a_gate_only_rows_that_passed_it_are_asked() -> None:
    right, style, last = Counted("right"), Counted("style"), Counted("last")
    grader = Combined({"right": right, "style": style, "last": last}, gates={"right": 1.0, "style": 0.5})
    columns = {"right": [0.9, 1.0, None, 1.0], "style": [7.0, 0.4, 0.5, 3.0], "last": [9.0, 9.0, 10.0, 20.0]}
    scores = combined(4, grader, **columns)
    assert scores.by_name["combined"] == pytest.approx([0.9, 1.4, 10.5, 24.0])
    assert [part.asked for part in (right, style, last)] == [[4], [3], [2]]
    assert scores.metrics["combined/style/asked_fraction"] == 0.75
    assert scores.metrics["combined/last/asked_fraction"] == 0.5
    assert scores.metrics["combined/last"] == 15.0
    assert "combined/right/asked_fraction" not in scores.metrics
    combined(2, grader, **{name: [0.0, 0.0] for name in columns})
    assert [len(part.asked) for part in (right, style, last)] == [2, 1, 1]  # nobody is left


def test_parts_are_given_their_rows_columns_and_logs() -> None:
    seen: list[Any] = []

    def part(prompts: Any, completions: Any, completion_ids: Any, answer: Any, log_metric: Any, log_extra: Any) -> Any:
        seen.append((prompts, completions, completion_ids, answer))
        log_metric("length", len(answer))
        log_extra("seen", answer)
        return [1.0] * len(completions)

    scores = combined(
        3, Combined({"gate": Counted("a"), "part": part}, gates={"gate": 1}), a=[1, 0, 1], answer=[4, 5, 6]
    )
    assert seen == [(["p", "p"], ["text 0", "text 2"], [[0], [2]], [4, 6])]
    assert scores.metrics["length"] == 2.0
    assert scores.extra == {"seen": [4, None, 6]}
    with pytest.raises(ConfigError, match="'combined' needs 'answer'"):
        RewardRunner(Combined({"part": part}), columns=["a"])


def test_async_parts_run_at_the_same_time() -> None:
    async def slow(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.3)
        return [1.0] * len(completions)

    begin = time.monotonic()
    scores = combined(1, Combined(dict.fromkeys("abcdefgh", slow)))
    assert scores.by_name == {"combined": [8.0]}
    assert time.monotonic() - begin < 2.0


def test_the_limit_of_the_whole_ends_a_part_and_is_what_the_error_names() -> None:
    def endless(completions: list[str]) -> list[float]:
        while True:
            time.sleep(0.01)

    async def endless_async(completions: list[str]) -> list[float]:
        await asyncio.sleep(60)
        return []

    for part in (endless, endless_async):
        with pytest.raises(RewardError, match=r"reward 'whole' took more than reward_timeout=0\.2"):
            RewardRunner(Combined({"part": part}, name="whole"), timeout=0.2).score(["p"], ["a"], [[1]], {})


def test_errors_of_a_part_name_it() -> None:
    broken = Combined({"style": lambda completions: [math.nan]})
    with pytest.raises(RewardError, match="reward 'style', row 0: returned nan"):
        combined(1, broken)
    with pytest.raises(RewardError, match=r"'combined', row 1: formula='1 / a' divides by 0 with \{'a': 0\.0\}"):
        combined(2, Combined({"a": Counted("a")}, formula="1 / a"), a=[1, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graders": {}}, "at least one"),
        ({"graders": {"a b": numeric_reward}}, "'a b': a name must be an identifier"),
        ({"graders": {"a": "my/model"}}, "Pass a reward model to the trainer"),
        ({"graders": {"a": torch.nn.Linear(1, 1)}}, "Pass a reward model to the trainer"),
        ({"formula": "a", "weights": {"a": 1, "b": 1}}, "formula and weights are both given"),
        ({"formula": "a"}, "does not use ['b']"),
        ({"weights": {"a": 1}}, "give one for each of ['a', 'b']"),
        ({"weights": {"a": 1, "c": 1}}, "weights: 'c' is not one of the graders"),
        ({"weights": {"a": 1, "b": math.nan}}, "weights['b']=nan"),
        ({"gates": {"a": None}}, "gates['a']=None"),
        ({"gates": {"b": 1.0}}, "'b' is the last reward"),
        ({"name": ""}, "name=''"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Combined(**{"graders": {"a": numeric_reward, "b": numeric_reward}, **options})
    assert message in str(caught.value)


def test_a_gate_need_not_be_in_the_formula() -> None:
    grader = Combined({"a": Counted("a"), "b": Counted("b")}, formula="b", gates={"a": 1})
    assert combined(2, grader, a=[1, 0], b=[3, 3]).by_name == {"combined": [3.0, 0.0]}


def test_other_parameters_of_a_part_are_another_reward() -> None:
    def whole(reference: str) -> str:
        return reward_fingerprint(Combined({"a": StringCheck(reference), "b": numeric_reward}))

    assert whole("x") == whole("x") != whole("y")


# By name.


def test_graders_with_parameters_are_read_from_a_text() -> None:
    grader = reward_by_name(
        "combined(graders={'right': string_check(reference='{answer}', ignore_case=True), 'number': numeric_reward,"
        " 'same': 'numeric_reward'}, weights={'right': 1, 'number': -0.5, 'same': 0}, gates={'right': 1.0})"
    )
    assert isinstance(grader, Combined)
    assert combined(2, grader, answer=["TEXT 0", 1]).by_name == {"combined": [0.5, 0.0]}
    assert RewardRunner(
        reward_by_name("score_model(base_url='http://h/v1', model='m', input='{completion}')")
    ).names == ["score_model"]


def test_functions_of_a_module_are_graders_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_of_mine.py").write_text("def short(completion):\n    return len(completion) < 9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    grader = reward_by_name("python(function='graders_of_mine:short', name='brief')")
    assert isinstance(grader, PythonGrader)
    assert combined(1, Combined({"a": grader})).by_name == {"combined": [1.0]}
    assert RewardRunner(grader).names == ["brief"]


def test_the_graders_of_the_docs_can_be_made() -> None:
    page = Path(__file__).parents[3] / "docs/graders.md"
    [block] = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    rewards = [reward_by_name(entry) for entry in yaml.safe_load(block)["reward_funcs"]]
    assert RewardRunner(rewards, columns=["answer"]).names == ["format_reward", "mentions", "combined"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("string_check", "the grader string_check needs its parameters"),
        ("string_chekc(reference='a')", "is neither a built-in reward nor module:function"),
        ("string_check('a')", "parameters of string_check must be given by name"),
        ("string_check(**{'reference': 'a'})", "must be given by name"),
        ("string_check(reference='a'", "cannot be read"),
        ("string_check(reference='a').setup()", "is not a reward with parameters"),
        ("string_check(reference=open('x'))", "parameters of open must be given by name"),
        ("string_check(reference=__name__)", "'__name__' is not allowed"),
        ("string_check(reference='a' * 9)", "\"'a' * 9\" is not allowed"),
        ("string_check(reference='a', level=1)", "unexpected keyword argument 'level'"),
        ("string_check()", "missing 1 required positional argument: 'reference'"),
        ("string_check(reference='a', operation='gt')", "operation='gt': is not one of"),
        ("combined(graders={'a': 'no_such_reward'})", "reward_funcs='no_such_reward'"),
        ("(string_check)", "is not a reward with parameters"),
        (":", "is neither a built-in reward nor module:function"),
    ],
)
def test_a_text_that_is_no_grader_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward_by_name(text)
    assert message in str(caught.value)


def rows(**columns: list[Any]) -> dict[str, Any]:
    """Three completions, of two data sources and one without a reward."""
    texts = ["1", "22", "333"]
    return {"prompts": texts, "completions": texts, "completion_ids": [[1]] * 3, "columns": columns}


def length(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
    """The length; also logs the completions and a number."""
    log_extra("said", completions)
    log_metric("longest", max(map(len, completions)))
    return [float(len(text)) for text in completions]


async def negated(completions: list[str], sign: list[int]) -> list[float]:
    """Minus the length."""
    await asyncio.sleep(0)
    return [float(s * len(text)) for s, text in zip(sign, completions, strict=True)]


def test_each_row_is_scored_by_the_reward_of_its_source() -> None:
    grader = BySource({"a": length, "b": negated, "chat": None})
    runner = RewardRunner(grader, columns=["data_source", "sign"])
    scores = runner.score(**rows(data_source=["b", "chat", "a"], sign=[-1, -1, -1]))
    assert scores.by_name == {"by_source": [-1.0, None, 3.0]}
    assert scores.extra == {"said": [None, None, "333"]}
    assert scores.metrics == {"by_source/a": 3.0, "by_source/b": -1.0, "longest": 3.0}


def test_a_source_without_a_reward_is_an_error_unless_there_is_a_default() -> None:
    row = r"grader 'by_source', row 2: column 'kind' is 'c', .* there are some for 'a', 'b'"
    sources = {"a": length, "b": length}
    with pytest.raises(DataError, match=row):
        RewardRunner(BySource(sources, column="kind")).score(**rows(kind=["a", "b", "c"]))
    scores = RewardRunner(BySource(sources, column="kind", default=numeric_reward)).score(
        **rows(kind=["a", "b", "c"], answer=["#### 1", "#### 2", "#### 333"])
    )
    assert scores.by_name == {"by_source": [1.0, 2.0, 1.0]}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rewards": {}}, "must be rewards by data source"),
        ({"rewards": {"a": torch.nn.Linear(1, 1)}}, r"rewards\['a'\] is Linear.*separate reward"),
        ({"rewards": {"a": length}, "default": 3}, "default is 3: must be a function"),
    ],
)
def test_what_cannot_score_a_source_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BySource(**given)


def test_a_column_that_the_reward_of_a_source_needs_is_asked_for_before_training() -> None:
    with pytest.raises(ConfigError, match="needs 'sign', which is not a column"):
        RewardRunner(BySource({"b": negated}), columns=["data_source"])


def test_sources_have_rewards_by_name_with_parameters() -> None:
    sources = {"a": "string_check(reference='1')", "b": "numeric_reward", "c": None}
    text = str(RewardEntry({"name": "by_source", "rewards": sources, "default": "numeric_reward"}))
    scores = RewardRunner(reward_by_name(text)).score(
        **rows(data_source=["a", "b", "d"], answer=["#### 1", "#### 3", "#### 333"])
    )
    assert scores.by_name == {"by_source": [1.0, 0.0, 1.0]}
