"""Episodes of agents: what they return, how they end, and what becomes of every token that was sampled for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from prefrl import ConfigError, Environment, EpisodeError
from prefrl.generation.local.turns import LocalTurns, TurnRequest
from prefrl.rollout.episodes.driver import EpisodeSampler
from prefrl.rollout.episodes.environment import Agent
from prefrl.types import Completion, Rollout
from tests.patience import PATIENCE, before_a_deadline
from tests.unit.rollout.episodes.scripted import ASK, Scripted, params, row, sampler

SAID = "said"


class Counting(Scripted):
    """A generator that counts the tokens that it samples."""

    def __init__(self, answer: Any = lambda *_: SAID, **options: Any) -> None:
        super().__init__(answer, **options)
        self.num_sampled = 0

    def turns(self, sampling: Any) -> LocalTurns:
        return LocalTurns(self._counted)

    def _counted(self, wave: Sequence[TurnRequest]) -> list[Completion]:
        found = self._generate(wave)
        self.num_sampled += sum(len(completion.token_ids) for completion in found)
        return found


async def post(client: Any, *messages: Any, **body: Any) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False) as http:
        answer = await http.post(
            f"{client.base_url}/chat/completions",
            headers={"authorization": f"Bearer {client.api_key}"},
            json={"model": client.model, "messages": list(messages or [ASK]), **body},
        )
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def play(
    solve: Any, *, generator: Any = None, rows: Any = None, num_samples: int = 1, **options: Any
) -> list[Rollout]:
    """The rollouts of an agent."""
    episodes: EpisodeSampler = sampler(generator or Counting(), factory=Agent(solve), **options)
    rows = rows or [row()]
    try:
        pending = episodes.start(rows, list(range(len(rows))), params(num_samples), [5 + i for i in range(len(rows))])
        found = dict(pending.as_completed())
        return [rollout for number in sorted(found) for rollout in found[number]]
    finally:
        episodes.close()


def balances(rollouts: Sequence[Rollout], generator: Counting) -> bool:
    """Whether every token that was sampled stands in a turn or was dropped."""
    kept = sum(len(rollout.sampled_ids) for rollout in rollouts if not rollout.has_failed)
    dropped = sum(rollout.episode.num_dropped for rollout in rollouts if rollout.episode)
    sampled = sum(rollout.episode.num_sampled for rollout in rollouts if rollout.episode)
    return generator.num_sampled == sampled == kept + dropped


async def answering(row: Any, client: Any) -> Any:
    said = await post(client)
    await post(client, ASK, {"role": "assistant", "content": said}, ASK)
    client.reward(0.25)
    return row["value"]


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        (1, 1.25, {}),
        (True, 1.25, {}),
        ({"right": 1.0, "short": 0.5}, 1.75, {"right": 1.0, "short": 0.5}),
        ("text", 0.25, {}),
        (None, 0.25, {}),
        ({"answer": "text"}, 0.25, {}),
    ],
)
def test_what_an_agent_returns_is_its_reward_or_its_result(value: Any, reward: float, parts: Any) -> None:
    (rollout,) = play(answering, rows=[row(value=value)])
    assert rollout.episode is not None
    assert (rollout.episode.reward, rollout.episode.rewards) == (reward, parts)
    assert rollout.episode.turn_rewards == [0.0, 0.25]
    assert rollout.episode.result == value
    assert [message["content"] for message in rollout.text] == [SAID, "hi", SAID]


def test_without_any_reward_there_is_none() -> None:
    async def solve(row: Any, client: Any) -> str:
        return await post(client)

    (rollout,) = play(solve)
    assert rollout.episode is not None
    assert (rollout.episode.reward, rollout.episode.result) == (None, SAID)


def test_a_reward_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(EpisodeError, match="returned the reward nan"):
        play(answering, rows=[row(value=float("nan"))])


# How an episode ends, and what becomes of its tokens.


async def hanging(row: Any, client: Any) -> float:
    await post(client)
    client.reward(0.5)
    await asyncio.Event().wait()
    return 1.0


def hanging_thread(row: Any, client: Any) -> float:
    asyncio.run(post(client))
    client.reward(0.5)
    time.sleep(PATIENCE)
    return 1.0


@pytest.mark.parametrize("solve", [hanging, hanging_thread])
def test_an_agent_that_hangs_has_what_it_was_credited_with(solve: Any) -> None:
    def attempt(seconds: float) -> tuple[Rollout, Counting] | None:
        generator = Counting()
        try:
            (rollout,) = play(solve, generator=generator, episode_timeout=seconds)
        except EpisodeError:  # there was no time for its first answer
            return None
        return (rollout, generator) if rollout.episode and any(rollout.episode.turn_rewards) else None

    rollout, generator = before_a_deadline(attempt)
    assert rollout.episode is not None
    assert (rollout.episode.stop_reason, rollout.episode.reward) == ("timeout", 0.5)
    assert rollout.finish_reason == "length"
    assert balances([rollout], generator)


async def endless(row: Any, client: Any) -> float:
    messages = [ASK]
    while True:
        messages += [{"role": "assistant", "content": await post(client, *messages)}, ASK]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 2}, "max_turns"), ({"max_tokens": 30}, "max_tokens"), ({}, "context")],
)
def test_an_agent_that_ends_at_a_limit_has_not_failed(limits: Any, reason: str) -> None:
    generator = Counting(context_limit=80)
    (rollout,) = play(endless, generator=generator, **limits)
    assert rollout.episode is not None
    assert (rollout.episode.stop_reason, rollout.episode.reward) == (reason, 0.0)
    assert balances([rollout], generator)


def test_an_agent_that_goes_on_after_a_refusal_has_come_to_its_end() -> None:
    async def solve(row: Any, client: Any) -> float:
        with pytest.raises(httpx.HTTPStatusError):
            await post(client, {"role": "user", "content": "long " * 100})
        await post(client)
        return 1.0

    (rollout,) = play(solve, generator=Counting(context_limit=80))
    assert rollout.episode is not None
    assert rollout.episode.stop_reason == "stop"


@pytest.mark.parametrize("mode", ["retry", "drop"])
def test_tokens_of_a_try_that_failed_are_dropped(mode: str) -> None:
    tries: list[int] = []

    async def fails(row: Any, client: Any) -> float:
        await post(client)
        tries.append(1)
        if len(tries) == 1:
            raise OSError("gone")
        return 1.0

    generator = Counting()
    rollouts = play(fails, generator=generator, rows=[row(), row()], environment_error=mode)
    assert sum(rollout.has_failed for rollout in rollouts) == (mode == "drop")
    assert sum(rollout.episode.num_dropped for rollout in rollouts if rollout.episode) == len(SAID) + 1
    assert balances(rollouts, generator)


class Gated(Counting):
    """A generator that says when it begins, and goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def _counted(self, wave: Sequence[TurnRequest]) -> list[Completion]:
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE)
        return super()._counted(wave)


def test_answers_that_nobody_waits_for_are_kept_while_the_agent_runs_and_dropped_at_its_end() -> None:
    async def solve(row: Any, client: Any) -> float:
        for content in ("first", "last"):
            asked = asyncio.ensure_future(post(client, {"role": "user", "content": content}))
            await asyncio.to_thread(generator.begun.acquire, timeout=PATIENCE)
            asked.cancel()
            generator.may_end.release()
            if content == "first":
                generator.may_end.release()
                await post(client)
                await asyncio.to_thread(generator.begun.acquire, timeout=PATIENCE)
        return 1.0

    generator = Gated()
    (rollout,) = play(solve, generator=generator)
    assert rollout.episode is not None
    assert len(generator.requests) == 3
    assert balances([rollout], generator)
    assert len(rollout.turns) + rollout.episode.num_dropped // (len(SAID) + 1) == 3


def test_a_request_after_the_end_samples_nothing() -> None:
    clients: list[Any] = []

    async def solve(row: Any, client: Any) -> float:
        await post(client)
        for ended in clients:
            with pytest.raises(httpx.HTTPStatusError):
                await post(ended)
        clients.append(client)
        return 1.0

    generator = Counting()
    rollouts = play(solve, generator=generator, rows=[row()] * 3, max_concurrent_environments=1)
    assert len(generator.requests) == 3
    assert balances(rollouts, generator)


def test_parallel_requests_of_many_episodes_balance() -> None:
    async def solve(row: Any, client: Any) -> float:
        begun = [[ASK], [ASK], [{"role": "user", "content": "other"}]]
        said = await asyncio.gather(*(post(client, *one) for one in begun))
        answers = [{"role": "assistant", "content": text} for text in said]
        await asyncio.gather(*(post(client, *one, answer, ASK) for one, answer in zip(begun, answers, strict=True)))
        return 1.0

    generator = Counting(lambda _, seed: f"{seed % 100}")
    rollouts = play(solve, generator=generator, rows=[row()] * 2, num_samples=2)
    assert {len(rollout.turns) for rollout in rollouts} == {6}
    assert balances(rollouts, generator)


def test_an_error_of_the_parser_is_not_the_agents() -> None:
    def parser(text: str) -> Any:
        return 3

    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}

    async def solve(row: Any, client: Any) -> float:
        await post(client, tools=[tool])
        return 1.0

    with pytest.raises(ConfigError, match="tool_parser: the function returned int"):
        play(solve, tool_parser=parser, environment_error="drop")


class Game(Environment):
    def get_reward(self) -> float:
        return 3.0


def test_agents_and_environments_are_mixed_by_the_column() -> None:
    async def solve(row: Any, client: Any) -> str:
        assert "environment" not in row
        return await post(client)

    episodes = sampler(Counting(), factory={"game": Game, "agent": Agent(solve)})
    try:
        rows = [row(environment=name) for name in ("game", "agent")]
        found = dict(episodes.start(rows, [0, 1], params(2), [5, 6]).as_completed())
    finally:
        episodes.close()
    told = [(one.episode.kind, one.episode.reward, one.episode.result) for n in (0, 1) for one in found[n]]
    assert told == [("Game", 3.0, None)] * 2 + [("solve", None, SAID)] * 2
