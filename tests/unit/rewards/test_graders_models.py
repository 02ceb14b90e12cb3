"""Graders that ask a model, against an endpoint of our own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefrl.errors import ConfigError, RewardError
from prefrl.rewards import LabelModel, PairwiseModel, RewardRunner, ScoreModel, get_judge_reward
from prefrl.rewards.graders import endpoint as chat
from prefrl.rewards.runner import reward_fingerprint
from tests.unit.rewards.endpoint import Endpoint, said

KEY = "key-that-nobody-may-see-0123456789"
LABELS = {"good": 1.0, "fair": 0.5, "bad": -1.0}
Serve = Callable[..., Endpoint]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(chat, "_FIRST_PAUSE_S", 0.0)
    running: list[Endpoint] = []

    def start(*arguments: Any, **options: Any) -> Endpoint:
        running.append(Endpoint(*arguments, **options))
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.close()


def label(endpoint: Endpoint, **options: Any) -> LabelModel:
    given = {"input": "{prompt} / {completion}", "labels": LABELS, **options}
    return LabelModel(base_url=endpoint.url, model="judge", **given)


def scored(grader: Any, completions: list[str], **columns: list[Any]) -> list[float | None]:
    scores = RewardRunner(grader).score(["p"] * len(completions), completions, [[1]] * len(completions), columns)
    return scores.by_name[grader.__name__]


# What is asked, and how answers are read.


def test_labels_have_their_values_and_requests_what_was_configured(serve: Serve) -> None:
    endpoint = serve(lambda question: "Let me see.\n**Good.**" if "/ a" in question else "*bad*")
    grader = label(endpoint, sampling_params={"max_tokens": 9})
    assert scored(grader, ["a", "b"]) == [1.0, -1.0]
    assert set(endpoint.paths) == {"/v1/chat/completions"}
    ending = "\n\nEnd your answer with a line that holds only one of these labels: good, fair, bad"
    assert sorted(endpoint.questions) == [f"p / a{ending}", f"p / b{ending}"]
    body = {"model": "judge", "max_tokens": 9, "messages": [{"role": "user", "content": endpoint.questions[0]}]}
    assert endpoint.bodies[0] == body
    assert endpoint.keys == [None, None]


def test_completions_and_columns_are_data(serve: Serve) -> None:
    endpoint = serve(lambda question: "good")
    messages = [{"role": "system", "content": "Judge {answer}."}, {"role": "user", "content": "{completion}"}]
    scored(label(endpoint, input=messages), ["{answer} {0} {{"], answer=["{completion}"])
    [body] = endpoint.bodies
    assert body["messages"][0] == {"role": "system", "content": "Judge {completion}."}
    assert body["messages"][1]["content"].startswith("{answer} {0} {{\n\n")
    assert scored(label(endpoint), ["half a pair: \ud800"]) == [1.0]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("bad", -1.0),
        ("good\nLabel: `Fair`!", 0.5),
        ("<think>good</think> **BAD**\n\n", -1.0),
        ("good or bad", None),
        ("good\nThat is all.", None),
        ("not good", None),
        ("", None),
    ],
)
def test_a_label_is_the_last_line(serve: Serve, answer: str, value: float | None) -> None:
    endpoint = serve(lambda question: answer if "odd" in question else "good")
    assert scored(label(endpoint, retries=0), ["odd", "even"]) == [value, 1.0]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("7", 7.0),
        ("1\n**Score:** 7.5.", 7.5),
        ("7/10", 7.0),
        ("8 out of 10", 8.0),
        ("(.5)", 0.5),
        ("3/5", None),
        ("11", None),
        ("-1", None),
        ("nan", None),
        ("7 of the points", None),
    ],
)
def test_a_score_is_a_number_of_the_scale_in_the_last_line(serve: Serve, answer: str, value: float | None) -> None:
    endpoint = serve(lambda question: answer if "odd" in question else "1")
    grader = ScoreModel(base_url=endpoint.url, model="m", input="{completion}", range=(0, 10), retries=0)
    assert scored(grader, ["odd", "even"]) == [value, 1.0]
    assert "a number from 0 to 10" in endpoint.questions[0]


def test_a_threshold_and_passing_labels_make_1_and_0(serve: Serve) -> None:
    endpoint = serve(lambda question: question[0])
    grader = ScoreModel(base_url=endpoint.url, model="m", input="{completion}", range=[0, 9], pass_threshold=6)
    assert scored(grader, ["5", "6", "7"]) == [0.0, 1.0, 1.0]
    passing = label(endpoint, input="{completion}", labels=["a", "b", "c"], passing_labels=["a", "b"])
    assert scored(passing, ["a", "b", "c"]) == [1.0, 1.0, 0.0]


def test_an_answer_that_was_cut_off_is_not_read(serve: Serve) -> None:
    endpoint = serve(lambda question: "good", finish_reason="length")
    with pytest.raises(RewardError, match="1 of 1 answers cannot be read"):
        scored(label(endpoint, retries=0), ["a"])


# Retries, errors, deadlines.


def test_unread_answers_are_asked_again_then_none_warned_of_once_and_counted(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = serve(lambda question: "who knows" if "/ odd" in question else "good")
    grader = label(endpoint, retries=2, name="style")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scores = RewardRunner(grader).score(["p"] * 2, ["odd", "even"], [[1]] * 2, {})
            assert scores.by_name == {"style": [None, 1.0]}
            assert scores.metrics == {"style/unread_fraction": 0.5}
    assert len(endpoint.bodies) == 3 + 1 + 3  # what was read is not asked again
    [message] = [record.getMessage() for record in caplog.records if "style" in record.getMessage()]
    assert "'who knows'" in message
    assert endpoint.url in message


def test_if_no_answer_can_be_read_the_error_quotes_the_first(serve: Serve) -> None:
    endpoint = serve(lambda question: "\x1b[31mwho knows")
    with pytest.raises(RewardError) as caught:
        scored(label(endpoint, retries=1, name="style"), ["a", "b"])
    for part in ("grader 'style'", f"POST {endpoint.url}/chat/completions", "who knows", "good, fair, bad"):
        assert part in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_server_that_fails_for_a_while_is_asked_again(serve: Serve) -> None:
    failures = iter([(500, "boom"), (429, "slow down"), (503, "loading")])
    endpoint = serve(lambda question: next(failures, "good"))
    assert scored(label(endpoint, retries=3), ["a"]) == [1.0]
    assert len(endpoint.bodies) == 4


@pytest.mark.parametrize(
    ("status", "body", "asked", "message"),
    [
        (500, "boom", 2, "answered 500: boom (asked 2 times)"),
        (401, '{"error": {"message": "wrong key KEY"}}', 1, "answered 401: wrong key ***"),
        (404, '{"error": {"message": "no model judge"}}', 1, "answered 404: no model judge"),
        (200, "<html>", 1, "the answer is not JSON"),
        (200, '{"result": 1}', 1, "no choices[0].message.content: {'result': 1}"),
    ],
)
def test_errors_name_grader_model_url_and_what_came_back_but_not_the_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int, body: str, asked: int, message: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    endpoint = serve(lambda question: (status, body.replace("KEY", KEY)))
    grader = label(endpoint, retries=1, api_key_env="JUDGE_KEY", name="style")
    with pytest.raises(RewardError) as caught:
        scored(grader, ["a"])
    text = str(caught.value)
    assert "grader 'style', model 'judge'" in text
    assert f"POST {endpoint.url}/chat/completions" in text
    assert message in text
    assert endpoint.keys == [f"Bearer {KEY}"] * asked
    shown, error = [text, repr(grader), str(vars(grader))], caught.value.__cause__
    assert not any(KEY in each for each in [*shown, str(error)])


def test_a_request_and_a_batch_have_deadlines(serve: Serve) -> None:
    slow = serve(lambda question: "good", delay=30.0)
    with pytest.raises(RewardError, match=r"no complete answer within 0\.1 s"):
        scored(label(slow, retries=0, timeout=0.1), ["a"])
    begin = time.monotonic()
    with pytest.raises(RewardError, match=r"reward_timeout=0\.2"):
        RewardRunner(label(slow), timeout=0.2).score(["p"], ["a"], [[1]], {})
    late = serve(lambda question: "first", delay=0.4)
    judge = PairwiseModel(base_url=late.url, model="m", input="{first} {second}", max_concurrency=1)
    with pytest.raises(RewardError, match=r"reward_timeout=0\.2"):
        RewardRunner(get_judge_reward(judge, num_generations=2), timeout=0.2).score(
            ["p"] * 2, ["a", "b"], [[1]] * 2, {}
        )
    assert time.monotonic() - begin < 10
    time.sleep(0.5)
    assert len(late.bodies) <= 1  # the second question is no longer asked


# Cost.


def test_equal_questions_are_asked_once_and_rows_without_a_column_not_at_all(serve: Serve) -> None:
    endpoint = serve(lambda question: "good")
    grader = label(endpoint, input="{completion} {answer}")
    assert scored(grader, ["a", "a", "b", "c"], answer=["x", "x", "x", None]) == [1.0, 1.0, 1.0, None]
    assert scored(grader, ["b", "d"], answer=["x", "x"]) == [1.0, 1.0]
    assert sorted(question[:3] for question in endpoint.questions) == ["a x", "b x", "d x"]


def test_the_cache_forgets_what_was_used_longest_ago(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_CACHED", 2)
    endpoint = serve(lambda question: "good")
    grader = label(endpoint, input="{completion}")
    for completion in ("a", "b", "a", "c", "a", "b"):
        scored(grader, [completion])
    assert [question[0] for question in endpoint.questions] == ["a", "b", "c", "b"]


def test_requests_run_at_the_same_time_up_to_the_limit(serve: Serve) -> None:
    endpoint = serve(lambda question: "good", delay=0.1)
    scored(label(endpoint, max_concurrency=3), [str(i) for i in range(9)])
    assert 2 <= endpoint.most_at_once <= 3


# Parameters.


def test_a_missing_key_ends_a_run_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    grader = LabelModel(
        base_url="http://localhost:1/v1", model="m", input="{completion}", labels=LABELS, api_key_env="JUDGE_KEY"
    )
    with pytest.raises(ConfigError, match="api_key_env='JUDGE_KEY': this environment variable is not set"):
        RewardRunner(grader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000'"),
        ({"base_url": "http://me:secret@localhost/v1"}, "must have no login"),
        ({"model": ""}, "model=''"),
        ({"input": "{prompt}"}, "{completion} is missing"),
        ({"input": [{"role": "user"}]}, "messages with role and content"),
        ({"labels": {"good": 1.0}}, "at least 2"),
        ({"labels": {"good": 1.0, "Good.": 0.0}}, "differ by more than case"),
        ({"labels": {"good": 1.0, "bad": None}}, "labels['bad']=None"),
        ({"labels": {"good": 1.0, "bad": float("inf")}}, "labels['bad']=inf"),
        ({"labels": ["good", "bad"]}, "passing_labels=None"),
        ({"labels": ["good", "bad"], "passing_labels": ["great"]}, "passing_labels=['great']"),
        ({"passing_labels": ["good"]}, "passing_labels has no effect"),
        ({"sampling_params": {"stream": True}}, "sampling_params has ['stream']"),
        ({"sampling_params": {"seed": object()}}, "is not valid JSON"),
        ({"sampling_params": {"top_p": float("nan")}}, "is not valid JSON"),
        ({"retries": -1}, "retries=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_concurrency": True}, "max_concurrency=True"),
    ],
)
def test_parameters_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"base_url": "http://localhost:1/v1", "model": "m", "input": "{completion}", "labels": LABELS}
    with pytest.raises(ConfigError) as caught:
        LabelModel(**{**given, **options})
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"range": (1, 1)}, "the first number must be below the second"),
        ({"range": 5}, "range=5"),
        ({"range": (0, 10), "pass_threshold": 11}, "pass_threshold=11"),
        ({"range": (0, 10), "pass_threshold": 0}, "pass_threshold=0"),
    ],
)
def test_scales_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ScoreModel(base_url="http://localhost:1/v1", model="m", input="{completion}", **options)
    assert message in str(caught.value)


def test_another_prompt_is_another_reward_and_another_address_is_not() -> None:
    def fingerprint(**options: Any) -> str:
        given = {"base_url": "http://localhost:1/v1", "model": "m", "input": "{completion}", **options}
        return reward_fingerprint(ScoreModel(**given))

    assert fingerprint() == fingerprint(base_url="http://localhost:2/v1", retries=0, timeout=1.0)
    assert len({fingerprint(), fingerprint(input="Score {completion}"), fingerprint(model="n")}) == 3


# Pairs.


def pairwise(endpoint: Endpoint, **options: Any) -> PairwiseModel:
    return PairwiseModel(base_url=endpoint.url, model="m", input="{prompt}|{first}|{second}|", **options)


def longer(question: str) -> str:
    _, first, second, _ = question.split("|")
    return "tie" if len(first) == len(second) else "first" if len(first) > len(second) else "second"


def test_a_judge_says_which_is_better_in_both_orders(serve: Serve) -> None:
    endpoint = serve(longer)
    judge = pairwise(endpoint)
    assert judge(["p", "p", "q"], [("aa", "a"), ("a", "aa"), ("b", "b")]) == [0, 1, None]
    reward = get_judge_reward(judge, num_generations=3)
    assert reward(prompts=["p"] * 3, completions=["a", "ccc", "bb"]) == [0.0, 1.0, 0.5]


def test_a_verdict_for_a_place_is_a_tie_unless_one_order_is_asked_for(serve: Serve) -> None:
    endpoint = serve(lambda question: "first")
    assert pairwise(endpoint)(["p"], [("a", "b")]) == [None]
    assert len(endpoint.bodies) == 2
    assert pairwise(endpoint, both_orders=False)(["p"], [("c", "d")]) == [0]
    assert len(endpoint.bodies) == 3


def test_a_judge_reads_only_prompt_and_completions() -> None:
    with pytest.raises(ConfigError, match=r"\{answer\} is not a field here: allowed are \{prompt\}, \{first\}"):
        PairwiseModel(base_url="http://localhost:1/v1", model="m", input="{first} {second} {answer}")
    with pytest.raises(ConfigError, match=r"\{second\} is missing"):
        PairwiseModel(base_url="http://localhost:1/v1", model="m", input="{first}")


def test_a_grader_can_be_awaited_by_hand(serve: Serve) -> None:
    endpoint = serve(lambda question: (200, said("good")))
    assert asyncio.run(label(endpoint)(completions=["a"], prompts=["p"])) == [1.0]
