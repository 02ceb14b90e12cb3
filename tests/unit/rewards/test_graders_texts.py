"""Graders that compare texts, templates, and a judge."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import PythonGrader, RewardRunner, StringCheck, TextSimilarity, get_judge_reward


def check(completion: str, reference: str, **options: Any) -> float | None:
    [value] = StringCheck("{answer}", **options)(completions=[completion], answer=[reference])
    return value


@pytest.mark.parametrize(
    ("operation", "completion", "reference", "value"),
    [
        ("eq", " Paris\n", "Paris", 1.0),
        ("eq", "Paris.", "Paris", 0.0),
        ("eq", "paris", "Paris", 0.0),
        ("ne", "Paris", "Paris", 0.0),
        ("ne", "London", "Paris", 1.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("regex", "It is 42.", r"\b\d{2}\b", 1.0),
        ("regex", "It is 421.", r"\b\d{2}\b", 0.0),
    ],
)
def test_each_operation_has_the_value_worked_out_by_hand(
    operation: Any, completion: str, reference: str, value: float
) -> None:
    assert check(completion, reference, operation=operation) == value


@pytest.mark.parametrize("operation", ["eq", "like", "regex"])
def test_case_is_ignored_only_if_asked_for(operation: Any) -> None:
    assert check("PARIS", "paris", operation=operation) == 0.0
    assert check("PARIS", "paris", operation=operation, ignore_case=True) == 1.0


def test_columns_are_literal_inside_a_pattern_and_a_column_alone_is_one() -> None:
    inside = StringCheck(r"answer: {answer}(?!\d)", operation="regex")
    completions = ["answer: 3.5", "answer: 3x5", "answer: 3.55"]
    assert inside(completions=completions, answer=["3.5"] * 3) == [1.0, 0.0, 0.0]
    assert StringCheck("{answer}", operation="regex")(completions=["3x5"], answer=["3.5"]) == [1.0]


def test_what_is_inserted_is_not_read_as_a_template() -> None:
    grader = StringCheck("{prompt}|{{completion}}|{answer}", input="{prompt}|{{completion}}|{completion}")
    assert grader(prompts=["{answer}"], completions=["{prompt} {0} }{"], answer=["{prompt} {0} }{"]) == [1.0]


def test_a_row_without_the_column_has_no_value_and_messages_are_read_as_text() -> None:
    says = [{"role": "assistant", "content": "7"}]
    assert StringCheck("{answer}")(completions=[says, says, says], answer=[7, None, 8]) == [1.0, None, 0.0]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    grader = StringCheck("system: Be brief.\n\nuser: Why?", input="{prompt}{completion}")
    assert grader(prompts=[prompt], completions=[""]) == [1.0]
    assert StringCheck("Why?", input="{prompt}{completion}")(prompts=[prompt[1:]], completions=[""]) == [1.0]


def test_a_runner_asks_for_the_columns_that_templates_read() -> None:
    grader = StringCheck("{answer}", name="correct")
    scores = RewardRunner(grader).score(["p"], ["a"], [[1]], {"answer": ["a"], "other": [3]})
    assert scores.by_name == {"correct": [1.0]}
    with pytest.raises(ConfigError, match=r"'correct' needs 'answer'.*Did you mean 'answers'"):
        RewardRunner(grader, columns=["answers"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StringCheck("{answer"), "reference='{answer': expected '}'"),
        (lambda: StringCheck(r"\d{3}", operation="regex"), "{3} is not a field"),
        (lambda: StringCheck("{answer.__class__}"), "{answer.__class__} is not a field"),
        (lambda: StringCheck("{answer!r}"), "{answer} is not a field"),
        (lambda: StringCheck("{class}"), "{class} is not a field"),
        (lambda: StringCheck("{completions}"), "Did you mean 'completion'"),
        (lambda: StringCheck("{self}"), "{self} is not the value of a row"),
        (lambda: StringCheck("a", input="{answer}"), "does not contain {completion}"),
        (lambda: StringCheck("a", operation="ilike"), "operation='like' and ignore_case=True"),
        (lambda: StringCheck("a", operation="equal"), "operation='equal': is not one of"),
        (lambda: StringCheck("(", operation="regex"), "not a valid regular expression"),
        (lambda: StringCheck("a", threshold=0.5), "threshold has no effect"),
        (lambda: StringCheck("a", name="a/b"), "name='a/b'"),
        (lambda: TextSimilarity("a", evaluation_metric="bleu"), "evaluation_metric='bleu'"),
        (lambda: TextSimilarity("a", pass_threshold=float("nan")), "pass_threshold=nan"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_a_column_that_is_no_pattern_is_named_with_its_row() -> None:
    with pytest.raises(DataError, match=r"row 1: column 'answer' is '\(', no regular expression"):
        StringCheck("{answer}", operation="regex")(completions=["a", "b"], answer=["a", "("])


def test_similarity_is_that_of_rapidfuzz() -> None:
    # "hello" -> "hallo": one deletion and one insertion in 5 + 5 characters.
    assert TextSimilarity("hallo")(completions=["hello "]) == [pytest.approx(0.8)]
    assert TextSimilarity("hallo", pass_threshold=0.8)(completions=["hello", "hxllx"]) == [1.0, 0.0]
    words = TextSimilarity("b a", evaluation_metric="token_sort_ratio", ignore_case=True)
    assert words(completions=["A B"]) == [1.0]
    assert TextSimilarity("b a")(completions=["a b"]) == [pytest.approx(1 - 4 / 6)]
    assert check("hello", "hallo", operation="fuzzy", threshold=0.8) == 1.0
    assert check("hello", "hallo", operation="fuzzy") == 0.0


@pytest.mark.parametrize(
    "metric",
    [
        "partial_ratio",
        "token_ratio",
        "token_set_ratio",
        "partial_token_ratio",
        "partial_token_sort_ratio",
        "partial_token_set_ratio",
        "weighted_ratio",
    ],
)
def test_each_metric_is_1_for_equal_texts(metric: str) -> None:
    assert TextSimilarity("one two", evaluation_metric=metric)(completions=["one two", "xyz"])[0] == 1.0


def test_without_rapidfuzz_a_run_ends_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    for grader in (TextSimilarity("a"), StringCheck("a", operation="fuzzy", name="close")):
        with pytest.raises(ImportError, match=r"prefrl\[fuzzy\]"):
            RewardRunner(grader)
    RewardRunner(StringCheck("a"))


# A function of one completion.


def test_a_function_of_one_completion_is_given_what_its_signature_names() -> None:
    def close(completion: str, answer: int, *, scale: int = 10) -> float | None:
        return None if answer < 0 else abs(len(completion) - answer) / scale

    grader = PythonGrader(close)
    columns: dict[str, list[Any]] = {"answer": [1, 3, -1], "other": [0, 0, 0]}
    says = [[{"role": "assistant", "content": text}] for text in ("a", "b", "c")]
    scores = RewardRunner(grader).score(["p"] * 3, says, [[1]] * 3, columns)
    assert scores.by_name == {"close": [0.0, 0.2, None]}
    scores = RewardRunner(grader).score(["p"] * 3, says, [[1]] * 3, {**columns, "scale": [1, 2, 4]})
    assert scores.by_name == {"close": [0.0, 1.0, None]}
    assert PythonGrader(lambda prompt: prompt == "p", name="same")(prompts=["p", "q"], completions=["a", "b"]) == [
        1,
        0,
    ]


async def later(completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "must be a function"),
        (later, "async function cannot be a grader"),
        (lambda **columns: 0.0, "must name its parameters"),
        (lambda completions: 0.0, "Did you mean 'completion'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PythonGrader(function)


def test_an_error_of_the_function_is_a_reward_error() -> None:
    def broken(completion: str) -> float:
        raise KeyError("x")

    with pytest.raises(RewardError, match="reward 'broken' raised KeyError"):
        RewardRunner(PythonGrader(broken)).score(["p"], ["a"], [[1]], {})


def longer(prompts: Any, pairs: Any) -> list[int | None]:
    return [None if len(a) == len(b) else int(len(b) > len(a)) for a, b in pairs]


def test_the_reward_is_the_share_of_comparisons_won() -> None:
    reward = get_judge_reward(longer, num_generations=3)
    rewards = reward(prompts=["p"] * 3 + ["q"] * 3, completions=["a", "bbb", "cc", "x", "yy", "zz"])
    assert rewards == [0.0, 1.0, 0.5, 0.0, 0.75, 0.75]


def test_completions_of_one_prompt_are_compared_with_each_other_alone() -> None:
    asked: list[tuple[str, tuple[str, str]]] = []

    def first(prompts: Any, pairs: Any) -> list[int]:
        asked.extend(zip(prompts, pairs, strict=True))
        return [0] * len(pairs)

    get_judge_reward(first, num_generations=2)(prompts=["p", "p", "q", "q"], completions=["a", "b", "c", "d"])
    assert asked == [("p", ("a", "b")), ("q", ("c", "d"))]


@pytest.mark.parametrize(
    ("judge", "completions", "message"),
    [
        pytest.param(longer, ["a"] * 3, "multiple of num_generations=2", id="half a group"),
        pytest.param(lambda prompts, pairs: [], ["a", "b"], "0 verdicts on 1 pairs", id="no verdict"),
        pytest.param(lambda prompts, pairs: [2], ["a", "b"], "rows 0 and 1 is 2", id="unknown verdict"),
    ],
)
def test_what_a_judge_must_not_say(judge: Any, completions: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        get_judge_reward(judge, num_generations=2)(prompts=["p"] * len(completions), completions=completions)


def test_one_completion_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="num_generations=1"):
        get_judge_reward(longer, num_generations=1)
