from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import math
import sys
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.rewards import REWARD_FUNCTIONS, RewardRunner, RewardScores, numeric_reward
from prefrl.types import Episode
from tests.patience import PATIENCE, before_a_deadline

TEXTS = ["a", "bb", "cccc"]


def score(reward: Any, *, columns: dict[str, list[Any]] | None = None, **options: Any) -> RewardScores:
    return RewardRunner(reward, **options).score(["p"] * 3, TEXTS, [[1], [1, 2], [1, 2, 3, 4]], columns or {})


def length(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def is_long(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if len(ids) == 1 else float(len(ids) > 2) for ids in completion_ids]


class Judge:
    async def __call__(self, completions: list[str], answer: list[int]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(c) == a) for c, a in zip(completions, answer, strict=True)]


# What is given to a reward.


def test_functions_get_what_their_signature_names() -> None:
    seen: dict[str, Any] = {}

    def everything(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * 3

    def some(answer: Any, *, level: int = 7, other: int = 8) -> list[float]:
        seen["some"] = (answer, level, other)
        return [0.0] * 3

    columns: dict[str, list[Any]] = {
        "answer": [1, 2, 3],
        "level": [4, 5, 6],
        "prompt": ["p"] * 3,
        "prompt_ids": [0] * 3,
    }
    score([everything, some], columns=columns)
    assert seen.pop("some") == ([1, 2, 3], [4, 5, 6], 8)
    assert callable(seen.pop("log_metric"))
    assert callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": ["p"] * 3,
        "completions": TEXTS,
        "completion_ids": [[1], [1, 2], [1, 2, 3, 4]],
        "answer": [1, 2, 3],
        "level": [4, 5, 6],
        "trainer_state": None,
    }


def test_trainer_state_is_passed_on() -> None:
    state = object()

    def reward(completions: Any, trainer_state: Any) -> list[float]:
        return [float(trainer_state is state)] * len(completions)

    scores = RewardRunner(reward).score(["p"], ["c"], [[1]], {}, trainer_state=state)
    assert scores.by_name == {"reward": [1.0]}


def test_a_function_that_empties_its_lists_does_not_harm_the_next() -> None:
    def greedy(completions: list[str], answer: list[int]) -> list[float]:
        completions.clear()
        answer.clear()
        return [1.0] * 3

    columns = {"answer": [1, 2, 3]}
    assert score([greedy, length], columns=columns).by_name["length"] == [1.0, 2.0, 4.0]
    assert columns == {"answer": [1, 2, 3]}


def test_the_users_lists_are_left_alone() -> None:
    functions: list[Any] = [length, is_long]
    weights = [1.0, 2.0]
    runner = RewardRunner(functions, weights=weights)
    functions.clear()
    weights.clear()
    assert (runner.names, runner.weights) == (["length", "is_long"], [1.0, 2.0])


def test_none_is_kept() -> None:
    def nothing(completions: list[str]) -> list[float | None]:
        return [None, None, 0.0]

    scores = score([is_long, nothing])
    assert scores.by_name == {"is_long": [None, 0.0, 1.0], "nothing": [None, None, 0.0]}


def test_names_are_unique_and_say_what_was_given() -> None:
    rewards: list[Any] = [
        length,
        functools.partial(is_long, x=1),
        Judge(),
        length,
        lambda completions: [0.0] * 3,
        length,
    ]
    assert RewardRunner(rewards).names == ["length", "is_long", "Judge", "length_2", "<lambda>", "length_3"]


def test_weights_default_to_one() -> None:
    assert RewardRunner([length, is_long]).weights == [1.0, 1.0]
    assert RewardRunner(length, weights=[0]).weights == [0.0]


def test_no_completions_call_no_function() -> None:
    scores = RewardRunner([length, is_long]).score([], [], [], {})
    assert scores.by_name == {"length": [], "is_long": []}


def test_what_functions_log_is_returned() -> None:
    async def logs(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("share", 1)
        log_metric("share", 0.5)
        log_extra("note", ("x", "y", "z"))
        return [0.0] * 3

    def logs_more(completions: list[str], log_metric: Any = None) -> list[float]:
        log_metric("other", 2.0)
        return [0.0] * 3

    scores = score([logs, logs_more])
    assert scores.metrics == {"share": 0.75, "other": 2.0}
    assert scores.extra == {"note": ["x", "y", "z"]}
    with pytest.raises(RewardError, match=r"log_extra\('note'\): 1 values for 3 completions"):
        score(lambda completions, log_extra: log_extra("note", [1]))


@pytest.mark.parametrize("name", ["loss", "reward", "kl", "rewards/length/mean", "health/mine"])
def test_a_metric_of_the_trainer_cannot_be_logged(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"log_metric\({name!r}\): this name belongs to the trainer.*Choose another"
    ):
        score(lambda completions, log_metric: log_metric(name, 1.0))


@pytest.mark.parametrize("name", ["reward", "length"])
def test_a_column_of_the_table_cannot_be_logged(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"log_extra\({name!r}\): the table of completions has this column"):
        score([length, lambda completions, log_extra: log_extra(name, [1.0] * 3)])


@pytest.mark.parametrize(
    ("values", "logged"),
    [
        ([1, "a", None], ["1", "a", None]),
        (["a", "\ud800b", "c"], ["a", "\\ud800b", "c"]),
        ([[1], {"a": 2}, 3], ["[1]", "{'a': 2}", "3"]),
        ([1, 2**70, 3], ["1", str(2**70), "3"]),
        ([1, 2.5, None], [1, 2.5, None]),
    ],
)
def test_a_logged_column_has_one_type(values: list[Any], logged: list[Any]) -> None:
    def reward(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("note", values)
        return [0.0] * 3

    assert score(reward).extra == {"note": logged}


# Values.


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, 2],
        (1.0, 0.0, 2.0),
        [True, False, 2],
        [np.float32(1), np.int64(0), np.array(2.0)],
        [np.bool_(True), torch.tensor(0), torch.tensor(2.0, dtype=torch.bfloat16)],
        [Fraction(1), 0, 2],
        np.array([1, 0, 2], dtype=np.int8),
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_unambiguous_values_become_floats(result: Any) -> None:
    values = score(lambda completions: result).by_name["<lambda>"]
    assert values == [1.0, 0.0, 2.0]
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returned None \(NoneType\).*Is a `return` missing"),
        (1.0, r"returned 1.0 \(float\)"),
        ("abc", r"returned 'abc' \(str\)"),
        ({"a": 1, "b": 2, "c": 3}, r"\(dict\)"),
        ({1.0, 2.0, 3.0}, r"\(set\)"),
        ((x for x in [1.0, 2.0, 3.0]), r"\(generator\)"),
        ([1.0, 2.0], "returned 2 values for 3 completions"),
        ([], "returned 0 values for 3 completions"),
        ([1.0, 2.0, 3.0, 4.0], "returned 4 values for 3 completions"),
        (np.ones((3, 1)), r"array of shape \(3, 1\)"),
        (torch.tensor(1.0), r"array of shape \(\)"),
        ([1.0, math.nan, 3.0], r"row 1: returned nan \(float\).*The completion is 'bb', the prompt 'p'$"),
        ([1.0, 2.0, math.inf], "row 2: returned inf"),
        ([-math.inf, 2.0, 3.0], "row 0: returned -inf"),
        (torch.tensor([1.0, math.nan, 3.0]), "row 1: returned nan"),
        ([1.0, 1e39, 3.0], "row 1: returned 1e[+]39"),
        ([1.0, 10**400, 3.0], "row 1: returned 1000"),
        ([1.0, "2", 3.0], r"row 1: returned '2' \(str\)"),
        ([[1.0], 2.0, 3.0], r"row 0: returned \[1.0\] \(list\)"),
        ([1.0, 2.0, 3j], "row 2: returned 3j"),
        ([torch.ones(1), 2.0, 3.0], "row 0: returned tensor"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_no_reward_is_refused_with_name_row_and_value(result: Any, message: str, is_async: bool) -> None:
    def sync_reward(completions: list[str]) -> Any:
        return result

    async def async_reward(completions: list[str]) -> Any:
        return result

    reward = async_reward if is_async else sync_reward
    with pytest.raises(RewardError, match=f"(?s)^reward '{reward.__name__}'.*{message}") as caught:
        score([length, reward])
    assert "allowed is a finite number" in str(caught.value)


def test_message_shortens_what_is_long() -> None:
    with pytest.raises(RewardError) as caught:
        RewardRunner(lambda completions: ["v" * 9999]).score(["p"], ["c" * 9999], [[1]], {})
    assert len(str(caught.value)) < 500


# Functions that fail.


def fails(completions: list[str], **_: Any) -> list[float]:
    return [1 / len(completion[1:]) for completion in completions]


async def fails_later(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return fails(completions)


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("reward", [fails, fails_later])
def test_exception_is_named_with_its_place_and_is_the_cause(reward: Any, timeout: float | None) -> None:
    with pytest.raises(RewardError, match=rf"reward '{reward.__name__}' raised ZeroDivisionError: .*") as caught:
        score([length, reward], timeout=timeout)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    line = reward.__code__.co_firstlineno + (1 if reward is fails else 2)
    assert f"(line {line} of {__file__})" in str(caught.value)
    assert "for a batch of 3 completions, of which 'a' to 'p' is the first." in str(caught.value)


def test_an_exception_whose_text_fails_or_is_long_is_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def reward(completions: list[str], error: Exception) -> list[float]:
        raise error

    mute, loud = (functools.partial(reward, error=error) for error in (Mute(), ValueError("x" * 10**6)))
    with pytest.raises(
        RewardError, match=r"raised Mute: \(its text cannot be shown: str\(\) raised RuntimeError\) \(line"
    ):
        score(mute)
    with pytest.raises(RewardError) as caught:
        score(loud)
    assert len(str(caught.value)) < 2000


def bad_on(numbers: set[int], result: Any) -> Any:
    """A reward whose calls with these numbers raise or return a bad result."""
    calls = itertools.count()

    def reward(completions: list[str]) -> Any:
        if next(calls) not in numbers:
            return [1.0] * len(completions)
        if isinstance(result, Exception):
            raise result
        return result

    return reward


@pytest.mark.parametrize("result", [ValueError("boom"), DataError("a bad row"), [math.nan] * 3, [1.0]])
def test_a_failed_batch_can_be_skipped(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = RewardRunner([length, bad_on({1, 2}, result)], on_error="skip")
    scores = [runner.score(["p"] * 3, TEXTS, [[1]] * 3, {}) for _ in range(4)]
    assert [each.by_name["length"] for each in scores] == [[1.0, 2.0, 4.0]] * 4
    assert [each.by_name["reward"] for each in scores] == [[1.0] * 3, [None] * 3, [None] * 3, [1.0] * 3]
    assert [each.metrics["rewards/reward/failed"] for each in scores] == [0.0, 1.0, 1.0, 0.0]
    assert scores[1].metrics["rewards/length/failed"] == 0.0
    (warning,) = caplog.records
    assert "values of reward 'reward' are None" in warning.getMessage()
    assert "counted in rewards/reward/failed" in warning.getMessage()


def test_ten_failed_batches_one_after_another_end_the_run() -> None:
    runner = RewardRunner(bad_on({*range(20)} - {9}, ValueError("boom")), on_error="skip")
    for _ in range(19):
        runner.score(["p"], ["c"], [[1]], {})
    with pytest.raises(RewardError, match=r"^10 batches failed one after another.*raised ValueError: boom"):
        runner.score(["p"], ["c"], [[1]], {})


@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError(), TimeoutError("of my own"), StopIteration()]
)
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_exceptions_that_would_get_lost_are_reported(error: BaseException, timeout: float | None) -> None:
    def leaves(completions: list[str]) -> list[float]:
        raise error

    async def leaves_later(completions: list[str]) -> list[float]:
        raise error

    for reward in (leaves, leaves_later):
        with pytest.raises(RewardError, match=f"reward '{reward.__name__}' raised "):
            score(reward, timeout=timeout)


def test_keyboard_interrupt_is_the_users() -> None:
    def interrupted(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


def test_errors_of_prefrl_stay_as_they_are() -> None:
    def complains(completions: list[str]) -> list[float]:
        raise ConfigError("judge_url: not set")

    with pytest.raises(ConfigError, match=r"^judge_url: not set$"):
        score(complains)


def test_coroutine_of_a_plain_function_is_not_awaited_and_says_so() -> None:
    async def inner(completions: list[str]) -> list[float]:
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"reward '<lambda>' returned .*make it one"):
        score(lambda completions: inner(completions))


# Time.


def test_async_functions_run_together_and_beside_the_others() -> None:
    # Each waits for the other two: one after another they would never end.
    async_ones = [threading.Event(), threading.Event()]
    is_sync_running = threading.Event()

    def waiting(mine: int) -> Any:
        async def reward(completions: list[str]) -> list[float]:
            async_ones[mine].set()
            while not (async_ones[1 - mine].is_set() and is_sync_running.is_set()):
                await asyncio.sleep(0.001)
            return [1.0] * 3

        return reward

    def plain(completions: list[str]) -> list[float]:
        assert all(event.wait(PATIENCE) for event in async_ones)
        is_sync_running.set()
        return [2.0] * 3

    scores = score([waiting(0), plain, waiting(1)], timeout=PATIENCE)
    assert scores.by_name == {"reward": [1.0] * 3, "plain": [2.0] * 3, "reward_2": [1.0] * 3}


def test_three_async_rewards_wait_at_the_same_time() -> None:
    begun = []

    async def waits_for_the_others(completions: list[str]) -> list[float]:
        begun.append(True)
        while len(begun) < 3:
            await asyncio.sleep(0.001)
        return [0.0] * 3

    score([waits_for_the_others] * 3, timeout=PATIENCE)


def test_works_where_an_event_loop_is_running() -> None:
    async def notebook_cell() -> RewardScores:
        return score([Judge(), functools.partial(Judge(), answer=[9, 9, 9])], columns={"answer": [1, 1, 4]})

    assert asyncio.run(notebook_cell()).by_name["Judge"] == [1.0, 0.0, 1.0]


def test_async_clients_outlive_a_call() -> None:
    loops = []

    async def reward(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    runner = RewardRunner(reward)
    for _ in range(2):
        runner.score(["p"], ["c"], [[1]], {})
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


@pytest.fixture
def is_over() -> Iterator[threading.Event]:
    """Of the test: what waits for it waits for too long."""
    event = threading.Event()
    yield event
    event.set()


def waits(is_over: threading.Event) -> Any:
    def waits_for_long(completions: list[str]) -> list[float]:
        is_over.wait()
        return [0.0] * 3

    return waits_for_long


def spins(is_over: threading.Event) -> Any:
    def spins_for_long(completions: list[str]) -> list[float]:
        while not is_over.is_set():
            pass
        return [0.0] * 3

    return spins_for_long


def awaits(is_over: threading.Event) -> Any:
    async def awaits_for_long(completions: list[str]) -> list[float]:
        await asyncio.sleep(600)
        return [0.0] * 3

    return awaits_for_long


def blocks(is_over: threading.Event) -> Any:
    async def never_awaits(completions: list[str]) -> list[float]:
        is_over.wait()
        return [0.0] * 3

    return never_awaits


@pytest.mark.parametrize("make", [waits, spins, awaits, blocks])
def test_time_out_ends_the_wait_and_names_the_function(make: Any, is_over: threading.Event) -> None:
    async def innocent(completions: list[str]) -> list[float]:
        return [0.0] * 3

    def attempt(seconds: float) -> tuple[float, str] | None:
        with pytest.raises(RewardError) as caught:
            score([length, innocent, reward], timeout=seconds)
        is_stalled = str(caught.value).startswith("reward 'length' took")
        return None if is_stalled else (seconds, str(caught.value))

    reward = make(is_over)
    seconds, words = before_a_deadline(attempt)
    blamed = (
        "async rewards 'innocent', 'never_awaits': one of them" if make is blocks else f"reward {reward.__name__!r}"
    )
    assert words.startswith(f"{blamed} took more than reward_timeout={seconds} s")


def test_runner_is_usable_after_a_blocked_event_loop(is_over: threading.Event) -> None:
    is_blocking = [True]

    async def reward(completions: list[str]) -> list[float]:
        if is_blocking.pop():
            is_over.wait()
        return [1.0]

    runner = RewardRunner(reward, timeout=0.1)
    with pytest.raises(RewardError):
        runner.score(["p"], ["c"], [[1]], {})
    is_blocking.append(False)
    runner.timeout = PATIENCE
    assert runner.score(["p"], ["c"], [[1]], {}).by_name == {"reward": [1.0]}


def test_function_within_its_time_runs_in_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default=0.0)
    variable.set(4.0)
    assert score(lambda completions: [variable.get()] * 3, timeout=30.0).by_name == {"<lambda>": [4.0] * 3}


# Checks before training.


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, anwser: [], "needs 'anwser'.*Did you mean 'answer'.*Columns: .'question', 'answer'."),
        (lambda prompt: [], "needs 'prompt'.*Did you mean 'prompts'"),
        (lambda completion: [], "needs 'completion'.*Did you mean 'completions'"),
        (lambda completions, zzz, **_: [], "needs 'zzz', which is not a column of the dataset. Columns"),
        (Judge().__call__, None),
        (lambda completions, zzz=1: [], None),
        (functools.partial(lambda completions, zzz: [], zzz=1), None),
        (numeric_reward, None),
    ],
)
def test_missing_column_is_found_in_the_signature(reward: Any, message: str | None) -> None:
    columns = ["prompt", "question", "answer"]
    if message is None:
        RewardRunner(reward, columns=columns)
        return
    with pytest.raises(ConfigError, match=message):
        RewardRunner(reward, columns=columns)
    with pytest.raises(ConfigError, match=message):
        RewardRunner(reward).check_columns(columns)


def test_missing_column_is_also_found_when_scoring() -> None:
    with pytest.raises(ConfigError, match="needs 'answer'"):
        score(Judge())


def test_columns_that_rewards_never_see_are_named_once_and_left_out() -> None:
    warnings: list[str] = []
    columns = {name: ["of the dataset"] for name in ("log_extra", "completions", "completion_ids")}
    runner = RewardRunner(length, columns=["prompt", *columns], warn=warnings.append)
    assert runner.score(["p"], ["four"], [[1]], columns).by_name == {"length": [4.0]}
    (text,) = warnings
    assert text.startswith("dataset columns ['completion_ids', 'completions', 'log_extra'] are not passed to rewards")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": []}, "at least one reward"),
        ({"reward_funcs": [length, 3]}, r"3 \(int\) is not a reward"),
        ({"reward_funcs": None}, r"None \(NoneType\) is not a reward"),
        ({"reward_funcs": length, "weights": [1.0, 2.0]}, "2 weights for 1 rewards"),
        ({"reward_funcs": length, "weights": [math.nan]}, "finite"),
        ({"reward_funcs": length, "timeout": 0.0}, "reward_timeout=0.0"),
        ({"reward_funcs": length, "timeout": math.nan}, "reward_timeout=nan"),
        ({"reward_funcs": dict.get}, "parameters .* cannot be given by name"),
        ({"reward_funcs": max}, "signature"),
    ],
)
def test_runner_refuses_what_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardRunner(**options)


def test_setup_is_called_before_training() -> None:
    class NeedsServer:
        def setup(self) -> None:
            raise ConfigError("no server")

        def __call__(self, completions: list[str]) -> list[float]:
            return []

    with pytest.raises(ConfigError, match="no server"):
        RewardRunner([length, NeedsServer()])


def test_missing_math_verify_is_found_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"accuracy_reward needs math_verify: pip install 'prefrl\[math\]'"):
        RewardRunner(REWARD_FUNCTIONS["accuracy_reward"])


def test_arguments_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="'answer': 2"):
        RewardRunner(length).score(["p"], ["c"], [[1]], {"answer": [1, 2]})


def test_every_named_reward_scores_text_and_messages() -> None:
    pytest.importorskip("math_verify")
    columns = {"answer": ["3"], "solution": ["3"]}
    message = [{"role": "assistant", "content": r"<think>x</think>\boxed{3}"}]
    texts = RewardRunner(list(REWARD_FUNCTIONS.values())).score(["p"], [message[0]["content"]], [[1]], columns)
    messages = RewardRunner(list(REWARD_FUNCTIONS.values())).score([[]], [message], [[1]], columns)
    assert list(texts.by_name) == list(REWARD_FUNCTIONS)
    assert texts.by_name == messages.by_name
    assert texts.by_name["numeric_reward"] == texts.by_name["accuracy_reward"] == [1.0]


# Environments.


class World:
    def __init__(self, score: float) -> None:
        self.score = score


class Other(World): ...


def episode(kind: str, reward: float | None, **parts: float) -> Episode:
    return Episode(kind, "stop", [0.0], reward=reward, rewards=parts, environment=World(4.0))


EPISODES = [episode("World", 1.5, won=1.0, fast=0.5), episode("Other", 2.0), episode("World", None, won=0.0)]


def test_rewards_of_environments_come_after_the_others_each_for_its_own_episodes() -> None:
    runner = RewardRunner([length], weights=[0.5], environments={"World": World, "Other": Other})
    scores = runner.score(["p"] * 3, TEXTS, [[1], [1], [1]], {}, episodes=EPISODES)
    assert runner.names == ["length", "World", "Other"]
    assert runner.weights == [0.5, 1.0, 1.0]
    assert set(runner.fingerprints) == {"length", "World", "Other"}
    assert scores.by_name == {"length": [1.0, 2.0, 4.0], "World": [1.5, None, None], "Other": [None, 2.0, None]}
    assert scores.metrics == {"rewards/World/won/mean": 0.5, "rewards/World/fast/mean": 0.5}


def test_environments_alone_are_rewards_enough() -> None:
    runner = RewardRunner([], environments={"World": World})
    scores = runner.score(["p"] * 3, TEXTS, [[1], [1], [1]], {}, episodes=EPISODES)
    assert scores.by_name == {"World": [1.5, None, None]}
    for environments in (None, {}):
        with pytest.raises(ConfigError, match=r"reward_funcs=\[\]: at least one reward is needed, or an environment_"):
            RewardRunner([], environments=environments)


def test_functions_may_ask_for_the_environments() -> None:
    def score_of(environments: list[World], **columns: Any) -> list[float]:
        return [environment.score for environment in environments]

    warnings: list[str] = []
    runner = RewardRunner(score_of, environments={}, columns=["a"], warn=warnings.append)
    assert runner.score(["p"] * 3, TEXTS, [[1]] * 3, {}, episodes=EPISODES).by_name == {"score_of": [4.0] * 3}
    runner.check_columns(["environments"])
    assert warnings[0].startswith("dataset columns ['environments'] are not passed to rewards")
    with pytest.raises(ConfigError, match="reward 'score_of' needs 'environments', which is not a column"):
        RewardRunner(score_of, columns=["a"])
    RewardRunner(score_of, columns=["environments"])  # a column like any other where there are none


def test_functions_may_ask_for_the_results_of_agents() -> None:
    def solve(row: Any, client: Any) -> str:
        return "text"

    def score_of(result: list[str | None], **columns: Any) -> list[float]:
        return [len(one or "") for one in result]

    episodes = [Episode("solve", "stop", [0.0], result="text"), Episode("World", "stop", [0.0], reward=1.0)]
    runner = RewardRunner(score_of, environments={"solve": solve, "World": World}, columns=["a"])
    scores = runner.score(["p"] * 2, TEXTS[:2], [[1]] * 2, {}, episodes=episodes)
    assert scores.by_name == {"score_of": [4.0, 0.0], "solve": [None, None], "World": [None, 1.0]}
    with pytest.raises(ConfigError, match="reward 'score_of' needs 'result', which is not a column"):
        RewardRunner(score_of, environments={"World": World}, columns=["a"])
