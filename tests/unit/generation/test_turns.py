"""Turns of conversations: whoever is ready is answered, and nobody is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from prefrl.errors import GenerationError
from prefrl.generation.base import Home, SamplingParams
from prefrl.generation.local.turns import LocalTurns, TurnRequest
from prefrl.generation.vllm.asking import Done, Failed, Lost, Outcome
from prefrl.generation.vllm.pending import MAX_RECOVERIES, VLLMTurns
from prefrl.generation.vllm.requests import PromptRequest
from prefrl.types import Completion
from tests.patience import PATIENCE, wait_until


def completion(*ids: int) -> Completion:
    return Completion(list(ids), "stop", [0.0] * len(ids), [True] * len(ids), [0] * len(ids))


class Talks:
    """Conversations as the sampler sees them."""

    def __init__(self) -> None:
        self.news = self.over = self.waiting = False
        self.num_attended = 0

    def has_news(self) -> bool:
        return self.news

    def is_over(self) -> bool:
        return self.over

    def is_waiting(self) -> bool:
        return self.waiting

    def attend(self) -> None:
        self.num_attended += 1


def seeds(wave: Sequence[TurnRequest]) -> list[int]:
    return [request.seed for request in wave]


def ask(turns: Any, seed: int, *, max_tokens: int = 5) -> Future[Completion]:
    return turns.ask([seed], max_tokens=max_tokens, seed=seed, home=Home())  # type: ignore[no-any-return]


def serving(turns: Any, talks: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Serve in a thread; returns it, and what it raised."""
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            turns.serve(talks)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, errors


# In this process.


def test_what_is_asked_together_is_one_wave_in_an_order_of_its_own() -> None:
    waves: list[list[int]] = []

    def generate(wave: Sequence[TurnRequest]) -> list[Completion]:
        waves.append(seeds(wave))
        talks.news = len(waves) == 2
        return [completion(one.seed, one.max_tokens) for one in wave]

    talks, turns = Talks(), LocalTurns(generate)
    answers = {seed: ask(turns, seed, max_tokens=seed + 1) for seed in (4, 2, 3)}
    answers[2].add_done_callback(lambda _: answers.setdefault(9, ask(turns, 9)))
    turns.serve(talks)
    assert waves == [[2, 3, 4], [9]]
    assert {seed: answer.result(0).token_ids for seed, answer in answers.items()} == {
        **{seed: [seed, seed + 1] for seed in (2, 3, 4)},
        9: [9, 5],
    }


def test_a_request_that_was_given_up_is_not_generated() -> None:
    waves: list[list[int]] = []

    def generate(wave: Sequence[TurnRequest]) -> list[Completion]:
        waves.append(seeds(wave))
        talks.over = True
        return [completion(1) for _ in wave]

    talks, turns = Talks(), LocalTurns(generate)
    assert ask(turns, 1).cancel()
    ask(turns, 2)
    turns.serve(talks)
    assert waves == [[2]]


def test_a_wait_for_a_moment_ends_however_long_the_process_is_held_up() -> None:
    """Each wait is shorter than it takes to begin it."""
    turns = LocalTurns(generate=lambda wave: [])

    def wait_often() -> None:
        for _ in range(20_000):
            turns.notify()
            assert turns._wait(PATIENCE) is None
            assert turns._wait(1e-6) is None

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["news", "over"])
def test_serving_ends_when_it_is_told_to(what: str) -> None:
    talks, turns = Talks(), LocalTurns(lambda wave: [])
    thread, errors = serving(turns, talks)
    thread.join(0.05)
    assert thread.is_alive()
    setattr(talks, what, True)
    turns.notify()
    thread.join(PATIENCE)
    assert (thread.is_alive(), errors) == (False, [])


@pytest.mark.parametrize("kind", ["local", "together", "vllm"])
def test_the_main_thread_attends_whenever_it_is_notified(kind: str) -> None:
    sums = {"local": None, "together": lambda number: number}
    talks = Talks()
    turns = VLLMTurns(Script(), PARAMS, step=lambda: 0) if kind == "vllm" else LocalTurns(lambda wave: [], sums[kind])
    thread, errors = serving(turns, talks)
    for _ in range(3):
        before = talks.num_attended
        turns.notify()
        assert wait_until(lambda before=before: talks.num_attended > before)
    talks.news = talks.over = True
    turns.notify()
    thread.join(PATIENCE)
    assert (thread.is_alive(), errors) == (False, [])


class Ranks:
    """Adds up numbers of two threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE)
        self._sum, self._lock = 0, threading.Lock()

    def __call__(self, number: int) -> int:
        with self._lock:
            self._sum += number
        self._barrier.wait()
        total = self._sum
        self._barrier.wait()
        self._sum = 0
        self._barrier.wait()
        return total


def test_ranks_that_need_each_other_generate_together_until_all_are_over() -> None:
    ranks = Ranks()
    waves: list[list[list[int]]] = [[], []]
    talks = [Talks(), Talks()]

    def generating(rank: int) -> LocalTurns:
        def generate(wave: Sequence[TurnRequest]) -> list[Completion]:
            waves[rank].append(seeds(wave))
            if len(waves[rank]) == rank + 2 and not talks[rank].over:  # the first rank is over earlier
                talks[rank].over = True
            elif wave:
                ask(turns[rank], 10 * rank + len(waves[rank]))
            return [completion(1) for _ in wave]

        return LocalTurns(generate, ranks)

    turns = [generating(0), generating(1)]
    for rank in (0, 1):
        ask(turns[rank], 10 * rank)
        talks[rank].news = rank == 1  # does not end it: the others need this rank
    threads = [serving(turns[rank], talks[rank]) for rank in (0, 1)]
    for thread, errors in threads:
        thread.join(PATIENCE)
        assert (thread.is_alive(), errors) == (False, [])
    assert len(waves[0]) == len(waves[1])  # each wave is a forward pass of all
    assert [wave for wave in waves[0] if wave] == [[0], [1]]
    assert [wave for wave in waves[1] if wave] == [[10], [11], [12]]


# On servers.


class Script:
    """An asker; the test says what becomes of the requests."""

    longest_silence = 1.0

    def __init__(self) -> None:
        self.asked: list[tuple[PromptRequest, Callable[[Outcome], None], bool]] = []
        self.works: list[Future[None]] = []
        self.num_recoveries = 0

    def submit(
        self, prompts: Sequence[PromptRequest], report: Callable[[Outcome], None], *, checks: bool = True
    ) -> Future[None]:
        self.asked += [(prompt, report, checks) for prompt in prompts]
        self.works.append(Future())
        return self.works[-1]

    def recover(self) -> None:
        self.num_recoveries += 1

    def done(self, number: int) -> None:
        prompt, report, _ = self.asked[number]
        report(Done(prompt, [completion(prompt.seed)]))

    def lost(self, number: int) -> None:
        prompt, report, _ = self.asked[number]
        report(Lost(prompt, "gone"))


PARAMS = SamplingParams(num_samples=4, max_tokens=99)


def test_each_turn_is_one_request_of_one_completion() -> None:
    script, home = Script(), Home("there")
    turns = VLLMTurns(script, PARAMS, step=lambda: 7)
    answers = [turns.ask([1, 2], max_tokens=3, seed=5, home=home), ask(turns, 6)]
    (prompt, _, checks), (other, _, others) = script.asked
    assert (prompt.token_ids, prompt.seed, prompt.step, prompt.home) == ([1, 2], 5, 7, home)
    assert (prompt.sampling.num_samples, prompt.sampling.max_tokens) == (1, 3)
    assert (prompt.number, other.number) == (0, 1)
    assert (checks, others) == (True, False)  # the servers' weights, once
    script.done(1)
    script.done(0)
    assert [answer.result(0).token_ids for answer in answers] == [[5], [6]]


def test_lost_turns_are_asked_for_again_once_all_wait_for_the_servers() -> None:
    script, talks = Script(), Talks()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    answers = [ask(turns, 5), ask(turns, 6)]
    thread, errors = serving(turns, talks)
    talks.waiting = True
    script.lost(0)
    thread.join(0.05)
    assert script.num_recoveries == 0  # the other request may still be answered
    talks.waiting = False
    script.done(1)
    thread.join(0.05)
    assert script.num_recoveries == 0  # the other conversation goes on
    talks.waiting = True
    turns.notify()
    assert wait_until(lambda: len(script.asked) == 3)
    assert script.num_recoveries == 1
    again = script.asked[2][0]
    assert (again.number, again.seed) == (0, 5)
    talks.waiting = False
    script.done(2)
    assert answers[0].result(0).token_ids == [5]
    talks.news = True
    turns.notify()
    thread.join(PATIENCE)
    assert (thread.is_alive(), errors) == (False, [])


def test_a_tool_that_runs_is_not_waited_for_by_the_recovery() -> None:
    script, talks = Script(), Talks()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    ask(turns, 5)
    thread, errors = serving(turns, talks)
    script.lost(0)
    thread.join(0.05)
    assert script.num_recoveries == 0
    talks.over = True  # the other conversation ended
    turns.notify()
    assert wait_until(lambda: script.num_recoveries == 1)
    talks.news = True
    turns.notify()
    thread.join(PATIENCE)
    assert (thread.is_alive(), errors) == (False, [])


def test_turns_that_are_lost_again_and_again_are_an_error() -> None:
    script, talks = Script(), Talks()
    talks.waiting = True
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    ask(turns, 5)
    thread, errors = serving(turns, talks)
    for number in range(MAX_RECOVERIES + 1):
        assert wait_until(lambda number=number: len(script.asked) == number + 1)
        script.lost(number)
    thread.join(PATIENCE)
    assert script.num_recoveries == MAX_RECOVERIES
    (error,) = errors
    assert isinstance(error, GenerationError)
    assert f"1 turns were lost {MAX_RECOVERIES + 1} times" in str(error)


def test_turns_that_are_lost_now_and_then_are_none() -> None:
    script, talks = Script(), Talks()
    talks.waiting = True
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    thread, errors = serving(turns, talks)
    for number in range(0, 2 * MAX_RECOVERIES + 2, 2):
        ask(turns, 5)
        script.lost(number)
        assert wait_until(lambda number=number: len(script.asked) == number + 2)
        script.done(number + 1)
    talks.news = True
    turns.notify()
    thread.join(PATIENCE)
    assert (script.num_recoveries, errors) == (MAX_RECOVERIES + 1, [])


def test_a_failure_is_raised_although_conversations_go_on() -> None:
    script, talks = Script(), Talks()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    ask(turns, 5)
    thread, errors = serving(turns, talks)
    prompt, report, _ = script.asked[0]
    report(Failed(prompt, GenerationError("mine")))
    thread.join(PATIENCE)
    assert [str(error) for error in errors] == ["mine"]


def test_one_who_does_not_serve_sees_who_is_stuck_and_repeats_what_was_lost() -> None:
    script, talks = Script(), Talks()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    answers = [ask(turns, 5), ask(turns, 6)]
    talks.waiting = True
    script.lost(0)
    assert not turns.is_stuck(talks)  # the other request may still be answered
    script.lost(1)
    assert turns.is_stuck(talks)
    talks.waiting = False
    assert not turns.is_stuck(talks)  # another conversation goes on
    talks.waiting = True
    turns.repeat_lost()
    assert not turns.is_stuck(talks)
    assert [(prompt.number, prompt.seed) for prompt, *_ in script.asked[2:]] == [(0, 5), (1, 6)]
    turns.repeat_lost()
    assert (len(script.asked), script.num_recoveries) == (4, 0)
    script.done(2)
    script.done(3)
    assert [answer.result(0).token_ids for answer in answers] == [[5], [6]]
    assert turns.is_stuck(talks)  # they wait for others to end


def test_turns_that_are_lost_again_and_again_are_an_error_for_one_who_does_not_serve() -> None:
    script = Script()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    ask(turns, 5)
    for number in range(MAX_RECOVERIES):
        script.lost(number)
        turns.repeat_lost()
    script.lost(MAX_RECOVERIES)
    with pytest.raises(GenerationError, match=rf"1 turns were lost {MAX_RECOVERIES + 1} times"):
        turns.repeat_lost()


def test_a_failure_is_seen_by_one_who_does_not_serve() -> None:
    script = Script()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    ask(turns, 5)
    assert turns.failure is None
    prompt, report, _ = script.asked[0]
    report(Failed(prompt, GenerationError("mine")))
    assert str(turns.failure) == "mine"


@pytest.mark.parametrize("outcome", ["done", "lost", "failed"])
def test_a_request_that_was_given_up_is_canceled_and_its_outcome_is_nobodys(outcome: str) -> None:
    script, talks = Script(), Talks()
    turns = VLLMTurns(script, PARAMS, step=lambda: 0)
    given_up, other = ask(turns, 5), ask(turns, 6)
    if outcome == "lost":
        script.lost(0)
    assert given_up.cancel()
    assert [work.cancelled() for work in script.works] == [True, False]
    prompt, report, _ = script.asked[0]
    report(Failed(prompt, GenerationError("mine"))) if outcome == "failed" else script.done(0)
    talks.waiting = True
    thread, errors = serving(turns, talks)
    script.lost(1)  # now all that is asked for is lost
    assert wait_until(lambda: len(script.asked) == 3)
    assert script.asked[2][0].seed == 6
    script.done(2)
    assert other.result(0).token_ids == [6]
    talks.news = True
    turns.notify()
    thread.join(PATIENCE)
    assert (thread.is_alive(), errors) == (False, [])
