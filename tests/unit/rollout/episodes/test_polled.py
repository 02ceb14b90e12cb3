"""Episodes that one looks at now and then, instead of waiting for them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from prefrl import Environment, EpisodeError
from prefrl.errors import GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.generation.vllm.asking import Done, Failed, Lost, Outcome
from prefrl.generation.vllm.pending import VLLMTurns
from prefrl.generation.vllm.requests import PromptRequest
from prefrl.rewards.call import EventLoopThread
from prefrl.rollout.episodes import driver
from prefrl.rollout.episodes.driver import EpisodeSampler, EpisodesPending
from prefrl.rollout.episodes.threads import LoopWatch
from prefrl.types import Rollout
from tests.patience import PATIENCE, wait_until
from tests.unit.rollout.episodes.scripted import call, completion, hermes, params, row, sampler


class Servers:
    """Servers that answer from a thread of theirs.

    Args:
        outcome: Of a request, by its number among all.
        said: What they say.
    """

    context_limit = None

    def __init__(self, outcome: Callable[[int], str] = lambda number: "done", *, said: str = "said") -> None:
        self._outcome, self._said = outcome, said
        self._thread = ThreadPoolExecutor(1)
        self.num_asked = 0

    def turns(self, sampling: SamplingParams) -> VLLMTurns:
        return VLLMTurns(self, sampling, step=lambda: 0)  # type: ignore[arg-type]

    def submit(self, prompts: Any, report: Any, *, checks: bool = True) -> Future[None]:
        return self._thread.submit(lambda: [report(self._answer(prompt)) for prompt in prompts] and None)

    def _answer(self, prompt: PromptRequest) -> Outcome[PromptRequest, Any]:
        self.num_asked += 1
        outcome = self._outcome(self.num_asked - 1)
        if outcome == "failed":
            return Failed(prompt, GenerationError("mine"))
        if outcome == "lost":
            return Lost(prompt, "gone")
        return Done(prompt, [completion(hermes(), self._said, prompt.sampling.max_tokens)])


def start(episodes: EpisodeSampler, rows: list[Any]) -> EpisodesPending:
    return episodes.start(rows, list(range(len(rows))), params(2), list(range(len(rows))))


@contextmanager
def closing(episodes: EpisodeSampler) -> Iterator[EpisodeSampler]:
    try:
        yield episodes
    finally:
        episodes.close()


def read(*all_pending: EpisodesPending, count: int) -> list[tuple[int, list[Rollout]]]:
    """What arrives, until there are so many."""
    found: list[tuple[int, list[Rollout]]] = []

    def are_there() -> bool:
        found.extend(group for pending in all_pending for group in pending.arrived())
        return len(found) >= count

    assert wait_until(are_there)
    return found


class Gated(Environment):
    gate = threading.Event()

    def reset(self, is_slow: bool = False, **row: Any) -> None:
        if is_slow:
            assert self.gate.wait(PATIENCE)


def test_groups_arrive_when_they_end_and_nobody_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gated, "gate", threading.Event())
    with closing(sampler(Servers(), factory=Gated, tool_timeout=2 * PATIENCE)) as episodes:
        pending = start(episodes, [row(is_slow=number == 1) for number in range(3)])
        first = read(pending, count=2)
        assert {number for number, _ in first} == {0, 2}
        assert list(pending.arrived()) == []
        assert not pending.is_stuck
        Gated.gate.set()
        ((number, rollouts),) = read(pending, count=1)
        assert (number, len(rollouts)) == (1, 2)
        assert list(pending.arrived()) == []
        pending.cancel()  # what has arrived is the caller's
        episodes.submit(asyncio.sleep(0)).result(PATIENCE)  # what the loop had to do is done
        assert len(episodes._in_use) == 6


def test_errors_of_episodes_and_of_turns_are_raised() -> None:
    def broken() -> None:
        """Break."""
        raise OSError("gone")

    def fail(episodes: EpisodeSampler) -> None:
        with closing(episodes):
            pending = start(episodes, [row()])
            try:
                read(pending, count=1)
            finally:
                pending.cancel()

    with pytest.raises(EpisodeError, match=r"tool 'broken' with arguments {}: OSError: gone"):
        fail(sampler(Servers(said=call("broken")), broken, tool_error="raise"))
    with pytest.raises(GenerationError, match="mine"):
        fail(sampler(Servers(lambda number: "failed"), factory=Gated))


def test_who_has_lost_turns_is_stuck_and_so_is_who_waits_for_their_places() -> None:
    """The first request is lost whenever it is sent until the servers are back."""
    are_back = threading.Event()
    servers = Servers(lambda number: "done" if are_back.is_set() else "lost")
    with closing(sampler(servers, factory=Gated, max_concurrent_environments=2)) as episodes:
        holding = start(episodes, [row()])
        assert wait_until(lambda: servers.num_asked == 2)
        waiting = start(episodes, [row()] * 2)
        assert wait_until(lambda: holding.is_stuck and waiting.is_stuck)
        assert [*holding.arrived(), *waiting.arrived()] == []
        are_back.set()
        holding.repeat_lost()
        waiting.repeat_lost()
        found = read(holding, waiting, count=3)
        assert [len(rollouts) for _, rollouts in found] == [2, 2, 2]


def test_what_has_ended_but_was_not_read_is_no_reason_to_call_it_stuck() -> None:
    """All others would be asked again for nothing, and servers be waited for that are there."""
    with closing(sampler(Servers(), factory=Gated)) as episodes:
        pending = start(episodes, [row()])
        assert wait_until(pending.is_over)
        assert wait_until(pending.is_waiting)
        assert not pending.is_stuck
        assert len(list(pending.arrived())) == 1


def test_functions_that_handle_signals_are_called_by_the_one_who_looks() -> None:
    def alarm() -> str:
        """Handle a signal, as only the main thread may."""
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        return "set"

    with closing(sampler(Servers(said=call("alarm")), alarm, tool_error="raise", max_turns=2)) as episodes:
        ((_, rollouts),) = read(start(episodes, [row()]), count=1)
    assert [one.text[1]["content"] for one in rollouts] == ["set", "set"]


# What blocks.


def test_an_async_tool_that_blocks_the_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def blocks() -> str:
        """Wait, but not with await."""
        gate.wait(PATIENCE)
        return "late"

    monkeypatch.setattr(driver, "_PATIENCE_SECONDS", 0.3)
    episodes = sampler(Servers(said=call("blocks")), blocks, tool_timeout=0.1)
    try:
        with pytest.raises(EpisodeError, match=r"blocked for 0.4 s \(line \d+ of .*\): an async function"):
            read(start(episodes, [row()]), count=1)
    finally:
        gate.set()


def test_time_in_which_nobody_looks_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may keep the loop from running, but does not look meanwhile."""
    now = 100.0
    monkeypatch.setattr("prefrl.rollout.episodes.threads.time.monotonic", lambda: now)
    loop, gate = EventLoopThread(), threading.Event()

    async def block() -> None:
        gate.wait(PATIENCE)

    loop.submit(block())
    watch = LoopWatch(loop, limit=10.0)
    try:
        for seconds in (100, 100, 100, 100):
            now += seconds
            assert watch.look() is None
        for _ in range(50):  # more often than is needed
            now += 0.01
            assert watch.look() is None
        now += 2
        assert "it does not start" in str(watch.look())
    finally:
        gate.set()
