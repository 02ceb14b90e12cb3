"""Many episodes at once: none waits for another, none changes another, and all failures are told."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from prefrl import DataError, Environment, EpisodeError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.turns import LocalTurns
from prefrl.generation.vllm.asking import Done, Lost
from prefrl.generation.vllm.pending import VLLMTurns
from prefrl.generation.vllm.requests import PromptRequest
from prefrl.rollout.episodes import driver
from prefrl.rollout.episodes.driver import EpisodeSampler, EpisodesPending
from prefrl.types import Rollout
from tests.patience import PATIENCE, wait_until
from tests.unit.rollout.episodes.scripted import ASK, Scripted, call, completion, hermes, params, row, sampler

SAID = "said"


def start(episodes: EpisodeSampler, rows: list[Any], num_samples: int = 1) -> EpisodesPending:
    groups = list(range(10, 10 + len(rows)))
    return episodes.start(rows, groups, params(num_samples), [1000 + group for group in groups])


@contextmanager
def closing(episodes: EpisodeSampler) -> Iterator[EpisodeSampler]:
    try:
        yield episodes
    finally:
        episodes.close()


def read(episodes: EpisodeSampler, pending: EpisodesPending) -> list[list[Rollout]]:
    """All rollouts in the order of the prompts; their environments are free again."""
    found = dict(pending.as_completed())
    for rollouts in found.values():
        episodes.release(rollouts)
    return [found[number] for number in range(len(found))]


class Answering(Environment):
    """Answers twice, and then no more."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def reset(self, **row: Any) -> None:
        Answering.seen, self.num_left = row, 3

    def respond(self, message: Any) -> str | None:
        self.num_left -= 1
        return "more" if self.num_left else None


class Meeting(Answering):
    """Answers once as many others are asked at the same time."""

    barrier = threading.Barrier(1)
    running, most, lock = 0, 0, threading.Lock()

    def respond(self, message: Any) -> str | None:
        with self.lock:
            Meeting.running += 1
            Meeting.most = max(Meeting.most, Meeting.running)
        self.barrier.wait(PATIENCE)
        with self.lock:
            Meeting.running -= 1
        return super().respond(message)


def talk(conversation: str, seed: int) -> str:
    return SAID


def test_all_environments_work_at_the_same_time_in_each_turn() -> None:
    Meeting.barrier = threading.Barrier(32)
    with closing(sampler(Scripted(talk), factory=Meeting, tool_timeout=2 * PATIENCE)) as episodes:
        rollouts = read(episodes, start(episodes, [row()] * 8, num_samples=4))
    assert [len(group) for group in rollouts] == [4] * 8
    assert {len(rollout.turns) for group in rollouts for rollout in group} == {3}


def test_no_more_are_played_at_once_than_allowed() -> None:
    Meeting.barrier, Meeting.most = threading.Barrier(2), 0
    options = {"max_concurrent_environments": 2, "tool_timeout": 2 * PATIENCE}
    with closing(sampler(Scripted(talk), factory=Meeting, **options)) as episodes:
        read(episodes, start(episodes, [row()] * 4))
    assert Meeting.most == 2


class Gated(Environment):
    gate = threading.Event()

    def reset(self, is_slow: bool = False, **row: Any) -> None:
        if is_slow:
            assert Gated.gate.wait(PATIENCE)


def test_a_slow_environment_delays_only_its_own_group() -> None:
    Gated.gate = threading.Event()
    with closing(sampler(Scripted(talk), factory=Gated)) as episodes:
        arrivals = start(episodes, [row(is_slow=number == 1) for number in range(4)], num_samples=2).as_completed()
        first = [next(arrivals)[0] for _ in range(3)]
        assert sorted(first) == [0, 2, 3]
        Gated.gate.set()
        assert [number for number, _ in arrivals] == [1]


# Seeds.


class Dice(Environment):
    """Answers depend on the seed, and take a while that does not."""

    def reset(self, goal: int, **row: Any) -> str:
        self.dice, self.num_left = random.Random(self.seed), 3
        time.sleep(random.random() / 100)
        return f" {goal} {self.seed}"

    async def respond(self, message: Any) -> str | None:
        await asyncio.sleep(random.random() / 100)
        self.num_left -= 1
        return str(self.dice.random()) if self.num_left else None


def ids_of(rows: list[Any], **options: Any) -> list[list[list[int]]]:
    generator = Scripted(lambda _, seed: f"{seed}")
    with closing(sampler(generator, factory=Dice, **options)) as episodes:
        rollouts = read(episodes, start(episodes, rows, num_samples=3))
    return [[turn.sent_ids + turn.completion.token_ids for turn in one.turns] for group in rollouts for one in group]


def test_the_order_of_arrival_changes_nothing() -> None:
    rows = [row(goal=number) for number in range(4)]
    ids = ids_of(rows)
    assert ids_of(rows, max_concurrent_environments=2) == ids
    assert len({tuple(turn) for episode in ids for turn in episode}) == 4 * 3 * 3


def test_a_seed_depends_on_prompt_sample_and_turn() -> None:
    generator = Scripted(talk)
    with closing(sampler(generator, factory=Answering)) as episodes:
        read(episodes, start(episodes, [row()] * 2, num_samples=2))
        seeds = {request.seed for request in generator.requests}
        assert len(seeds) == 2 * 2 * 3
        generator.requests.clear()
        read(episodes, start(episodes, [row()], num_samples=1))  # the first sample of the first prompt
        assert {request.seed for request in generator.requests} < seeds


# Failures.


class Failing(Environment):
    """Fails as often as its row says, in its answer to the first turn."""

    tries: Counter[int] = Counter()  # noqa: RUF012
    seeds: list[int] = []  # noqa: RUF012

    def reset(self, number: int, failures: int, **row: Any) -> None:
        Failing.tries[number] += 1
        Failing.seeds.append(self.seed)
        self.fails = Failing.tries[number] <= failures

    def respond(self, message: Any) -> None:
        if self.fails:
            raise OSError("gone")

    def get_reward(self) -> float:
        return 1.0


def failing(mode: str, *failures: int) -> tuple[list[Rollout], Scripted]:
    Failing.tries, Failing.seeds = Counter(), []
    generator = Scripted(talk)
    with closing(sampler(generator, factory=Failing, environment_error=mode)) as episodes:
        rows = [row(number=number, failures=count) for number, count in enumerate(failures)]
        return [rollout for (rollout,) in read(episodes, start(episodes, rows))], generator


def test_an_episode_that_failed_begins_again_with_its_seeds(caplog: pytest.LogCaptureFixture) -> None:
    (kept, dropped), generator = failing("retry", 2, 3)
    assert not kept.has_failed
    assert kept.episode is not None
    assert kept.episode.reward == 1.0
    assert Failing.tries == {0: 3, 1: 3}
    assert len(set(Failing.seeds)) == 2
    assert Counter(request.seed for request in generator.requests).most_common() == [
        (generator.requests[0].seed, 3),
        *[(seed, 3) for seed in {request.seed for request in generator.requests} - {generator.requests[0].seed}],
    ]
    assert dropped.has_failed
    (record,) = caplog.records
    assert "Failing.respond: OSError: gone. The episode is begun again" in record.getMessage()


def test_nothing_is_learned_from_an_episode_that_failed() -> None:
    (kept, dropped), _ = failing("drop", 0, 1)
    assert Failing.tries == {0: 1, 1: 1}
    assert not kept.has_failed
    assert dropped.episode is not None
    assert dropped.episode.stop_reason == "environment_error"
    assert (dropped.episode.reward, dropped.episode.environment) == (None, None)
    (turn,) = dropped.turns
    assert turn.sent_ids + turn.completion.token_ids == kept.turns[0].sent_ids + kept.turns[0].completion.token_ids
    assert not any(turn.completion.trainable)
    assert dropped.text == [{"role": "assistant", "content": SAID}]


class Broken(Environment):
    def reset(self, fails: bool = True, **row: Any) -> None:
        if fails:
            raise OSError("gone")


def test_an_episode_without_turns_has_one_that_stands_for_them() -> None:
    with closing(sampler(Scripted(talk), factory=Broken, environment_error="drop")) as episodes:
        (failed,), _ = read(episodes, start(episodes, [row(), row(fails=False)]))
    (turn,) = failed.turns
    assert turn.sent_ids == row()["prompt_ids"]
    assert (turn.completion.trainable, turn.completion.finish_reason) == ([False], "abort")
    assert failed.episode is not None
    assert failed.episode.turn_rewards == [0.0]
    assert failed.prompt == [ASK]


def test_the_run_ends_if_one_must_not_fail() -> None:
    with pytest.raises(EpisodeError, match=r"Failing.respond: OSError: gone. Fix the environment, or set"):
        failing("raise", 0, 1)


class Unclosable(Broken):
    is_used = False

    def reset(self, fails: bool = True, **row: Any) -> None:
        self.is_used = True
        super().reset(fails, **row)

    def close(self) -> None:
        if self.is_used:
            raise RuntimeError("cannot be closed")


def test_a_failed_environment_that_cannot_be_closed_is_no_reason_to_end() -> None:
    with closing(sampler(Scripted(talk), factory=Unclosable, environment_error="retry")) as episodes:
        (failed,), (kept,) = read(episodes, start(episodes, [row(), row(fails=False)]))
    assert (failed.has_failed, kept.has_failed) == (True, False)


def exits() -> str:
    """End the process."""
    raise SystemExit(3)


def test_a_tool_that_exits_is_told() -> None:
    answers = iter([call("exits"), "oh"])
    with closing(sampler(Scripted(lambda *_: next(answers)), exits)) as episodes:
        ((rollout,),) = read(episodes, start(episodes, [row()]))
    assert rollout.text[1]["content"] == '{"error": "RuntimeError: SystemExit: 3"}'


def test_a_tool_that_handles_signals_is_run_while_the_main_thread_waits() -> None:
    def limited() -> str:
        """Limit."""
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return "limited"

    answers = iter([call("limited"), "ok"])
    with closing(sampler(Scripted(lambda *_: next(answers)), limited, tool_timeout=5.0)) as episodes:
        ((rollout,),) = read(episodes, start(episodes, [row()]))
    assert rollout.text[1]["content"] == "limited"


def test_an_error_of_the_generator_reaches_the_caller() -> None:
    def broken(conversation: str, seed: int) -> str:
        raise ZeroDivisionError("mine")

    episodes = sampler(Scripted(broken), factory=Answering)
    with closing(episodes), pytest.raises(ZeroDivisionError, match="mine"):
        read(episodes, start(episodes, [row()] * 3))


def test_a_row_must_name_its_environment() -> None:
    with closing(sampler(Scripted(talk), factory={"a": Answering, "b": Failing})) as episodes:
        (rollout,), (other,) = read(
            episodes, start(episodes, [row(environment="a"), row(environment="b", number=0, failures=0)])
        )
        assert [one.episode.kind for one in (rollout, other) if one.episode] == ["Answering", "Failing"]
        assert Answering.seen == {"prompt": [ASK]}  # the column says which one it is, and is nothing for it
        for name in ("c", None):
            with pytest.raises(
                DataError, match=rf"column 'environment' of a row is {name!r}: must be one of .*'a', 'b'"
            ):
                read(episodes, start(episodes, [row(environment=name)]))


class Flaky:
    """Servers that lose every third request when it is sent first, and answer from a thread of theirs."""

    longest_silence = 1.0

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._sent: set[int] = set()
        self.num_recoveries = 0
        self.pending: EpisodesPending

    def submit(self, prompts: Any, report: Any, *, checks: bool = True) -> Future[None]:
        return self._thread.submit(lambda: [self._answer(prompt, report) for prompt in prompts] and None)

    def _answer(self, prompt: PromptRequest, report: Any) -> None:
        is_new = prompt.seed not in self._sent
        self._sent.add(prompt.seed)
        if is_new and prompt.seed % 3 == 0:
            report(Lost(prompt, "gone"))
        else:
            report(Done(prompt, [completion(hermes(), f"{prompt.seed}", prompt.sampling.max_tokens)]))

    def recover(self) -> None:
        assert self.pending.is_waiting(), "while an episode goes on by itself"
        self.num_recoveries += 1

    def turns(self, sampling: SamplingParams) -> VLLMTurns:
        return VLLMTurns(self, sampling, step=lambda: 0)

    context_limit = None


@pytest.mark.parametrize("most", [None, 3])
def test_turns_that_are_lost_come_back_and_no_episode_is_forgotten(most: int | None) -> None:
    rows = [row(goal=number) for number in range(8)]
    servers: Any = Flaky()
    with closing(sampler(servers, factory=Dice, max_concurrent_environments=most)) as episodes:
        servers.pending = start(episodes, rows, num_samples=3)
        rollouts = read(episodes, servers.pending)
    assert servers.num_recoveries > 0
    expected = ids_of(rows)
    assert [
        [turn.sent_ids + turn.completion.token_ids for turn in one.turns] for group in rollouts for one in group
    ] == expected


def test_an_error_ends_the_wait_for_other_processes_too() -> None:
    class Together(Scripted):
        def turns(self, sampling: SamplingParams) -> LocalTurns:
            return LocalTurns(self._generate, lambda number: number)

    def broken() -> None:
        """Break."""
        raise OSError("gone")

    episodes = sampler(Together(lambda *_: call("broken")), broken, tool_error="raise")
    with closing(episodes), pytest.raises(EpisodeError, match=r"tool 'broken' with arguments {}: OSError: gone"):
        read(episodes, start(episodes, [row()] * 2))


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_processes_serve_together_equally_often_whatever_each_has(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Together(Scripted):
        def turns(self, sampling: SamplingParams) -> LocalTurns:
            return LocalTurns(self._generate, lambda number: number)

    calls: list[Any] = []
    serve = LocalTurns.serve
    monkeypatch.setattr(LocalTurns, "serve", lambda self, episodes: calls.append(serve(self, episodes)))
    episodes = sampler(Together(lambda *_: SAID))
    with closing(episodes):
        assert len(read(episodes, start(episodes, [row()] * num_rows, 2))) == num_rows
    assert len(calls) == 1


class Silent(Scripted):
    """The test answers; notes whether all waited whenever it was notified."""

    def __init__(self) -> None:
        super().__init__(talk)
        self.asked: list[Future[Any]] = []
        self.waited: list[bool] = []
        self.pending: EpisodesPending | None = None

    def turns(self, sampling: SamplingParams) -> Any:
        return self

    def ask(self, *_: Any, **__: Any) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def notify(self) -> None:
        self.waited.append(self.pending is not None and self.pending.is_waiting())


def test_an_episode_waits_from_its_request_until_its_answer_and_the_sampler_is_told() -> None:
    silent, gate = Silent(), threading.Event()

    async def block() -> None:
        gate.wait(PATIENCE)

    with closing(sampler(silent, factory=Gated, max_concurrent_environments=1)) as episodes:
        Gated.gate = threading.Event()
        silent.pending = pending = start(episodes, [row(is_slow=True)] * 2)
        assert not pending.is_waiting()
        Gated.gate.set()
        assert wait_until(pending.is_waiting)
        assert wait_until(lambda: silent.waited[-1])
        assert len(silent.asked) == 1
        episodes.submit(block())
        silent.asked[0].set_result(completion(hermes(), SAID, 9))
        assert not pending.is_waiting()  # the loop has not seen the answer yet
        gate.set()
        assert wait_until(lambda: len(silent.asked) == 2)
        assert wait_until(pending.is_waiting)
        pending.cancel()


# Instances.


class Counted(Environment):
    made: list[Counted] = []  # noqa: RUF012
    closed: list[Counted] = []  # noqa: RUF012
    resets = 0

    def __init__(self) -> None:
        Counted.made.append(self)

    def reset(self, is_slow: bool = False, **row: Any) -> None:
        Counted.resets += 1
        if is_slow:
            assert Gated.gate.wait(PATIENCE)

    def close(self) -> None:
        Counted.closed.append(self)


@pytest.fixture
def counted() -> Iterator[EpisodeSampler]:
    Gated.gate = threading.Event()
    Counted.made, Counted.closed, Counted.resets = [], [], 0
    episodes = sampler(Scripted(talk), factory=Counted)
    yield episodes
    Gated.gate.set()
    episodes.close()


def test_instances_are_kept_until_the_rollouts_are_scored_and_then_used_again(counted: EpisodeSampler) -> None:
    first = dict(start(counted, [row()] * 3).as_completed())
    environments = {id(rollout.episode.environment) for (rollout,) in first.values() if rollout.episode}
    assert environments == {id(one) for one in Counted.made}
    read(counted, start(counted, [row()] * 2))
    assert len(Counted.made) == 5
    for rollouts in first.values():
        counted.release(rollouts)
        counted.release(rollouts)  # no harm
        assert rollouts[0].episode is not None
        assert rollouts[0].episode.environment is None
    read(counted, start(counted, [row()] * 5))
    assert (len(Counted.made), Counted.resets) == (5, 10)
    assert not Counted.closed
    counted.close()
    assert sorted(map(id, Counted.closed)) == sorted(map(id, Counted.made))


def test_what_is_read_stays_with_its_reader(counted: EpisodeSampler) -> None:
    arrivals = start(counted, [row(is_slow=number == 0) for number in range(2)], num_samples=2).as_completed()
    number, rollouts = next(arrivals)
    arrivals.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: len(Counted.closed) == 2)  # the hung ones
    assert number == 1
    held = {id(rollout.episode.environment) for rollout in rollouts if rollout.episode}
    assert held == set(counted._in_use)
    read(counted, start(counted, [row()] * 2))
    assert len(Counted.made) == 6


def test_what_nobody_reads_is_free_again(counted: EpisodeSampler) -> None:
    pending = start(counted, [row(is_slow=number == 0) for number in range(2)], num_samples=2)
    pending._turns.serve(pending)
    assert len(counted._in_use) == 2
    pending.cancel()
    assert wait_until(lambda: len(Counted.closed) == 2 and not counted._in_use)
    read(counted, start(counted, [row()] * 2))
    assert len(Counted.made) == 4


def test_a_request_that_is_dropped_before_it_is_read_leaves_nothing_behind(counted: EpisodeSampler) -> None:
    pending = start(counted, [row()] * 3)
    assert wait_until(lambda: Counted.resets == 3)
    pending.cancel()
    pending.cancel()
    assert wait_until(lambda: len(Counted.closed) == 3)
    assert not counted._in_use
    assert len(read(counted, start(counted, [row()]))) == 1


# What blocks.


def test_an_async_tool_that_blocks_the_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def blocks() -> str:
        """Wait, but not with await."""
        gate.wait(PATIENCE)
        return "late"

    monkeypatch.setattr(driver, "_PATIENCE_SECONDS", 0.3)
    episodes = sampler(Scripted(lambda *_: call("blocks")), blocks, tool_timeout=0.1)
    message = r"blocked for 0.4 s \(line \d+ of .*\): an async function of a tool or an environment .* Use await"
    try:
        with pytest.raises(EpisodeError, match=message):
            read(episodes, start(episodes, [row()]))
    finally:
        gate.set()


def test_options_of_sampling_are_those_of_the_run() -> None:
    seen: list[SamplingParams] = []

    class Noting(Scripted):
        def turns(self, sampling: SamplingParams) -> Any:
            seen.append(sampling)
            return super().turns(sampling)

    with closing(sampler(Noting(talk), factory=Answering)) as episodes:
        read(episodes, start(episodes, [row()]))
    assert seen == [params(1)]
