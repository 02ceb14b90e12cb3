"""Agents that do what they should not, side by side with one that behaves."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from prefrl.rollout.episodes.environment import with_agents
from prefrl.types import Rollout
from tests.patience import PATIENCE
from tests.unit.rollout.episodes.scripted import ASK, Scripted, params, row, sampler

HUNDRED_MB = 100 * 2**20


class Web:
    """A connection to the policy that costs as little as possible.

    Args:
        client: What the agent is given.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.statuses: Counter[int] = Counter()

    async def __aenter__(self) -> Web:
        host, _, port = self._client.root.removeprefix("http://").rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def post(self, body: bytes) -> dict[str, Any]:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._client.api_key}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        self._writer.write(body)
        answer = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), PATIENCE)
        fields = dict(line.split(": ", 1) for line in answer.decode().lower().split("\r\n")[1:-2])
        self.statuses[int(answer.split(b" ", 2)[1])] += 1
        found: dict[str, Any] = json.loads(await self._reader.readexactly(int(fields["content-length"])))
        return found

    async def say(self, messages: list[Any]) -> list[Any]:
        """The conversation with the policy's answer."""
        said = await self.post(json.dumps({"messages": messages}).encode())
        return [*messages, {"role": "assistant", "content": said["choices"][0]["message"]["content"]}]


async def talk(row: Any, client: Any) -> float:
    """It behaves."""
    messages = [ASK]
    async with Web(client) as web:
        for number in range(row["num_turns"]):
            messages = [*await web.say(messages), {"role": "user", "content": f"And {number}?"}]
    return 1.0


async def never_call(row: Any, client: Any) -> float:
    return 1.0


def exit_1(row: Any, client: Any) -> None:
    raise SystemExit(1)


async def send_100_mb(row: Any, client: Any) -> float:
    async with Web(client) as web:
        refused = await web.post(b"x" * HUNDRED_MB)
        assert "at most" in refused["error"]["message"]
    async with Web(client) as web:
        await web.say([ASK])
    return 1.0


async def flood(row: Any, client: Any) -> float:
    """A thousand requests at the same time: as many as may wait are answered."""

    async def ask(number: int) -> Counter[int]:
        try:
            async with Web(client) as web:
                await web.post(json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode())
                return web.statuses
        except (OSError, asyncio.IncompleteReadError):  # too many connections
            return Counter()

    found = sum(await asyncio.gather(*map(ask, range(row["flood"]))), Counter[int]())
    assert set(found) <= {200, 429}, found
    return 1.0


async def fork_20(row: Any, client: Any) -> float:
    """Conversations that go on from the same two turns."""
    async with Web(client) as web:
        trunk = await web.say([*await web.say([ASK]), ASK])

    async def branch(number: int) -> None:
        async with Web(client) as web:
            await web.say([*trunk, {"role": "user", "content": f"branch {number}"}])

    await asyncio.gather(*map(branch, range(20)))
    return 1.0


LATE: list[asyncio.Task[int]] = []


async def call_after_the_end(row: Any, client: Any) -> float:
    async def late() -> int:
        for _ in range(1000):  # rounds of the loop; the end of this function is noted in a few
            await asyncio.sleep(0)
        async with Web(client) as web:
            await web.post(json.dumps({"messages": [ASK]}).encode())
            (status,) = web.statuses
            return status

    async with Web(client) as web:
        await web.say([ASK])
    LATE.append(asyncio.create_task(late()))
    return 1.0


async def outlast(row: Any, client: Any) -> float:
    """It behaves, and ends after those who call after their end, so that the gateway is still there."""
    async with Web(client) as web:
        await web.say([ASK])
    while len(LATE) < row["num_late"]:
        await asyncio.sleep(0.01)
    await asyncio.wait(LATE)
    return 1.0


UNRULY = {
    agent.__name__: agent
    for agent in (talk, never_call, exit_1, send_100_mb, flood, fork_20, call_after_the_end, outlast)
}


def play(num_episodes: dict[str, int], **columns: Any) -> dict[str, list[Rollout]]:
    """The rollouts of so many episodes of each agent, all at once."""
    episodes = sampler(Scripted(lambda *_: "said"), factory=with_agents(None, UNRULY), environment_error="drop")
    rows = [row(environment=name, **columns) for name, number in num_episodes.items() for _ in range(number)]
    found: dict[str, list[Rollout]] = {name: [] for name in num_episodes}
    try:
        pending = episodes.start(rows, list(range(len(rows))), params(1), list(range(len(rows))))
        for number, rollouts in pending.as_completed():
            found[rows[number]["environment"]] += rollouts
    finally:
        episodes.close()
    return found


def opened() -> tuple[int, int, int]:
    """How many file descriptors, threads and children this process has.

    The thread of a sampler's loop ends when the sampler is collected.
    """
    gc.collect()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)
