"""The least busy working server is next; nothing waits for a server that will not be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prefrl.generation.vllm.client import Balance, Server
from tests.patience import PATIENCE


def run(scenario: Callable[[Balance], Coroutine[Any, Any, None]], max_under_way: int = 2) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(Balance(["a", "b"], max_under_way)), timeout=PATIENCE)

    asyncio.run(main())


async def take(balance: Balance, *avoid: str) -> Server:
    server = await balance.take(avoid=avoid)
    assert server is not None
    return server


def test_turns_alternate_between_equally_busy_servers() -> None:
    async def scenario(balance: Balance) -> None:
        assert [(await take(balance)).url for _ in range(4)] == ["a", "b", "a", "b"]

    run(scenario)


def test_a_turn_is_waited_for_while_all_servers_are_busy_first_come_first_served() -> None:
    async def scenario(balance: Balance) -> None:
        taken = [await take(balance) for _ in range(4)]
        first, second = asyncio.create_task(take(balance)), asyncio.create_task(take(balance))
        await asyncio.sleep(0)
        assert not first.done()
        balance.give_back(taken[1])
        assert (await first).url == "b"
        assert not second.done()
        balance.give_back(taken[0])
        assert (await second).url == "a"

    run(scenario)


def test_a_server_that_fails_is_asked_last_although_it_is_idle() -> None:
    async def scenario(balance: Balance) -> None:
        balance.servers[0].num_failures = 1
        assert [(await take(balance)).url for _ in range(3)] == ["b", "b", "a"]

    run(scenario)


def test_a_server_to_avoid_is_taken_if_there_is_no_other() -> None:
    async def scenario(balance: Balance) -> None:
        balance.servers[1].num_failures = 1
        assert (await take(balance, "a")).url == "b"
        balance.distrust(balance.servers[1], "gone")
        assert (await take(balance, "a")).url == "a"

    run(scenario)


def test_a_prompt_waits_for_another_server_than_the_one_to_avoid_and_holds_up_nobody() -> None:
    async def scenario(balance: Balance) -> None:
        assert [(await take(balance)).url for _ in range(2)] == ["a", "b"]
        avoiding, other = asyncio.create_task(take(balance, "a")), asyncio.create_task(take(balance))
        await asyncio.sleep(0)
        balance.give_back(balance.servers[0])
        assert (await other).url == "a"
        assert not avoiding.done()
        balance.give_back(balance.servers[1])
        assert (await avoiding).url == "b"

    run(scenario, max_under_way=1)


def test_nobody_waits_once_no_server_is_trusted() -> None:
    async def scenario(balance: Balance) -> None:
        await take(balance)
        await take(balance)
        waiting = [asyncio.create_task(balance.take(avoid=())) for _ in range(3)]
        await asyncio.sleep(0)
        for server in balance.servers:
            balance.distrust(server, f"{server.url} is gone")
        assert [await one for one in waiting] == [None, None, None]
        assert balance.reasons == "a is gone; b is gone"
        balance.trust_all()
        assert balance.reasons == ""
        for server in balance.servers:
            balance.give_back(server)
        assert (await take(balance)).url == "a"

    run(scenario, max_under_way=1)


def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    async def scenario(balance: Balance) -> None:
        taken = [await take(balance) for _ in range(2)]
        gone, next_one = asyncio.create_task(take(balance)), asyncio.create_task(take(balance))
        await asyncio.sleep(0)
        gone.cancel()
        balance.give_back(taken[0])
        assert (await next_one).url == "a"

    run(scenario, max_under_way=1)


def test_a_turn_that_comes_with_its_cancellation_is_given_back() -> None:
    async def scenario(balance: Balance) -> None:
        taken = [await take(balance) for _ in range(2)]
        gone = asyncio.create_task(take(balance))
        await asyncio.sleep(0)
        balance.give_back(taken[0])  # the turn is there, and the task has not run since
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert [server.under_way for server in balance.servers] == [0, 1]

    run(scenario, max_under_way=1)


def test_a_conversation_waits_for_the_server_that_has_its_history() -> None:
    async def scenario(balance: Balance) -> None:
        assert [(await take(balance)).url for _ in range(2)] == ["a", "b"]
        at_home, other = asyncio.create_task(balance.take(avoid=(), home="b")), asyncio.create_task(take(balance))
        await asyncio.sleep(0)
        balance.give_back(balance.servers[0])
        assert (await other).url == "a"
        assert not at_home.done()
        balance.give_back(balance.servers[1])
        server = await at_home
        assert server is not None
        assert server.url == "b"

    run(scenario, max_under_way=1)


def test_a_conversation_leaves_a_home_that_is_gone_or_to_be_avoided() -> None:
    async def scenario(balance: Balance) -> None:
        for avoid, home in ((("b",), "b"), ((), "no such server")):
            server = await balance.take(avoid=avoid, home=home)
            assert server is not None
            assert server.url == "a"
            balance.give_back(server)
        balance.distrust(balance.servers[1], "gone")
        server = await balance.take(avoid=(), home="b")
        assert server is not None
        assert server.url == "a"

    run(scenario)
