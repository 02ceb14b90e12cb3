"""What becomes of a prompt when servers fail, and which server is next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from prefrl.errors import GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.generation.vllm import asking as code
from prefrl.generation.vllm.asking import Balance, Done, Failed, Lost, Outcome, Server
from prefrl.generation.vllm.client import ServerAsker
from prefrl.generation.vllm.fleet import VLLMStats
from prefrl.generation.vllm.pending import VLLMPending
from prefrl.generation.vllm.requests import Aborted, PromptRequest
from prefrl.http import Overdue, Refused, Unreachable
from tests.patience import PATIENCE, wait_until
from tests.unit.generation.scripted import A, B, ScriptedHttp

GENERATE = "/inference/v1/generate"
OURS = "run:3"
PROMPT = PromptRequest(0, [1, 2], 7, SamplingParams(num_samples=1, max_tokens=2), 3)


def completion(json: Any, version: str = OURS) -> Any:
    content = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
    spans = [{"version": version, "start": 0, "end": 2}]
    choice = {"index": 0, "finish_reason": "length", "token_ids": [5, 6], "logprobs": {"content": content}}
    choice["weight_versions"] = spans
    return {"request_id": f"generate-tokens-{json['request_id']}", "choices": [choice]}


class Servers:
    """Two servers; `generate` answers for both of them."""

    def __init__(self, generate: Callable[[str, Any], Any]) -> None:
        self.generate = generate
        self.versions = {A: OURS, B: OURS}
        self.gone: set[str] = set()

    def answer(self, url: str, path: str, json: Any) -> Any:
        if url in self.gone:
            raise Unreachable("no connection")
        if path == GENERATE:
            return self.generate(url, json)
        return {"weight_version": self.versions[url]} if path == "/weight_info" else None


class Asking:
    """An asker with all that it needs."""

    def __init__(self, servers: Servers, request_timeout: float) -> None:
        self.http = ScriptedHttp(servers.answer)
        self.fleet = SimpleNamespace(
            run="run",
            step=3,
            version=OURS,
            is_sending=False,
            stats=VLLMStats(),
            model_name=lambda url: "m",
            recover=lambda: None,
            engines=lambda url: [url],
            addresses=[A, B],
        )
        self.balance = Balance([A, B], 4)
        self.asker = ServerAsker(
            self.fleet,
            self.balance,
            http=self.http,
            vocab_size=8,
            stop_ids=[7],
            request_timeout=request_timeout,
            guided=None,
        )

    def ask(self) -> Outcome:
        outcomes: list[Outcome] = []
        self.asker.submit([PROMPT], outcomes.append).result(timeout=PATIENCE)
        (outcome,) = outcomes
        return outcome

    def requests(self, url: str) -> int:
        return self.http.paths(url).count(GENERATE)


MakeAsking = Callable[..., Asking]


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAsking]:
    monkeypatch.setattr(code, "_BACKOFF_SECONDS", 0.01)
    made: list[Asking] = []

    def make(servers: Servers, *, request_timeout: float = PATIENCE) -> Asking:
        made.append(Asking(servers, request_timeout))
        return made[-1]

    yield make
    for each in made:
        each.http.close()


def fails(error: Exception) -> Callable[[str, Any], Any]:
    def generate(url: str, json: Any) -> Any:
        raise error

    return generate


def test_a_prompt_of_a_server_that_is_gone_goes_to_another_one(asking: MakeAsking) -> None:
    servers = Servers(lambda _, json: completion(json))
    ask = asking(servers)
    servers.gone = {A}
    ask.balance.servers[1].num_failures = 9  # the other one comes first
    outcome = ask.ask()
    assert isinstance(outcome, Done)
    assert outcome.result[0].token_ids == [5, 6]
    assert (ask.requests(A), ask.requests(B)) == (1, 1)
    assert (ask.fleet.stats.requests, ask.fleet.stats.retries) == (2, 1)


def test_another_server_is_tried_before_the_one_that_failed_is_tried_again(asking: MakeAsking) -> None:
    def generate(url: str, json: Any) -> Any:
        if url == A:
            raise Refused("broken", status=500)
        return completion(json)

    ask = asking(Servers(generate))
    ask.balance.servers[1].num_failures = 9  # its other requests fail too
    assert isinstance(ask.ask(), Done)
    assert (ask.requests(A), ask.requests(B)) == (1, 1)


def test_a_prompt_whose_next_turn_comes_after_its_deadline_is_lost_and_not_late(asking: MakeAsking) -> None:
    def busy(url: str, json: Any) -> Any:
        if url == A:
            raise Unreachable("busy")
        return completion(json)

    async def free_the_other_one() -> None:
        ask.balance.give_back(ask.balance.servers[1])

    ask = asking(Servers(busy), request_timeout=0.01)
    ask.balance.servers[1].under_way = 4  # requests that take long
    outcomes: list[Outcome] = []
    asked = ask.asker.submit([PROMPT], outcomes.append)
    assert wait_until(lambda: ask.requests(A) == 1)
    time.sleep(0.1)  # the prompt is given up 0.04 s after its first turn
    ask.http.submit(free_the_other_one()).result(timeout=PATIENCE)
    asked.result(timeout=PATIENCE)
    assert outcomes == [Lost(PROMPT, f"{A}: busy")]
    assert (ask.requests(B), ask.fleet.stats.retries) == (0, 0)
    assert [server.under_way for server in ask.balance.servers] == [0, 3], "the turn was not given back"


def test_a_prompt_is_lost_when_all_servers_are_gone_and_asked_for_after_recovery(asking: MakeAsking) -> None:
    servers = Servers(lambda _, json: completion(json))
    ask = asking(servers)
    servers.gone = {A, B}
    outcome = ask.ask()
    assert isinstance(outcome, Lost)
    assert "is gone: no connection" in outcome.reason
    servers.gone = set()
    assert isinstance(ask.ask(), Lost), "asked before recovery"
    ask.asker.recover()
    assert isinstance(ask.ask(), Done)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Overdue("late"), "Last error: late. If completions take that long, raise request_timeout in vllm_kwargs."),
        (Aborted("broken off"), "is healthy but failed several requests for the completions. Last error: broken off."),
    ],
)
def test_a_prompt_fails_when_servers_live_and_never_complete_it(
    error: Exception, words: str, asking: MakeAsking
) -> None:
    ask = asking(Servers(fails(error)))
    outcome = ask.ask()
    assert isinstance(outcome, Failed)
    assert str(outcome.error).startswith("prompt 0 of process 0: the vLLM server at http://")
    assert words in str(outcome.error)
    assert ask.fleet.stats.requests == 3
    assert ask.requests(A) >= 1
    assert ask.requests(B) >= 1


@pytest.mark.parametrize("error", [Refused("broken", status=500), Unreachable("busy")])
def test_errors_of_a_server_that_lives_are_waited_out_however_it_words_them(
    error: Exception, asking: MakeAsking
) -> None:
    ask = asking(Servers(fails(error)))
    outcome = ask.ask()
    assert isinstance(outcome, Lost)
    assert outcome.reason.endswith(f": {error}")
    assert ask.fleet.stats.requests == 3
    assert ask.requests(A) >= 1
    assert ask.requests(B) >= 1


def test_a_request_that_is_refused_is_not_repeated(asking: MakeAsking) -> None:
    ask = asking(Servers(fails(Refused("too long", status=400))))
    outcome = ask.ask()
    assert isinstance(outcome, Failed)
    assert "refuses: too long" in str(outcome.error)
    assert ask.fleet.stats.requests == 1


def test_tokens_by_other_weights_are_lost_and_their_server_is_left_out(asking: MakeAsking) -> None:
    ask = asking(Servers(lambda _, json: completion(json, "other:3")))
    outcome = ask.ask()
    assert isinstance(outcome, Lost)
    assert (ask.requests(A), ask.requests(B)) == (1, 1)
    assert "other:3" in ask.balance.reasons


@pytest.mark.parametrize(("step", "expected"), [(2, Lost), (3, Done), (5, Done), (6, Lost)])
def test_tokens_are_by_the_weights_of_the_call_or_by_those_that_were_sent_since(
    step: int, expected: type[Outcome], asking: MakeAsking
) -> None:
    ask = asking(Servers(lambda _, json: completion(json, f"run:{step}")))
    ask.fleet.step = 5
    assert isinstance(ask.ask(), expected)


@pytest.mark.parametrize(("is_sending", "expected"), [(False, Lost), (True, Done)])
def test_servers_with_other_weights_are_asked_only_while_ours_are_on_their_way(
    is_sending: bool, expected: type[Outcome], asking: MakeAsking
) -> None:
    servers = Servers(lambda _, json: completion(json))
    servers.versions = {A: "updating", B: "updating"}
    ask = asking(servers)
    ask.fleet.is_sending = is_sending
    assert isinstance(ask.ask(), expected)


# What a pool of groups asks.


def requested(count: int) -> list[PromptRequest]:
    return [PromptRequest(i, [1, 2], 7 + i, SamplingParams(num_samples=1, max_tokens=2), 3) for i in range(count)]


def all_arrived(pending: VLLMPending[Any, Any], count: int) -> list[int]:
    """The numbers of the requests that arrive, until there are this many."""
    numbers: list[int] = []

    def are_there() -> bool:
        numbers.extend(number for number, _ in pending.arrived())
        return len(numbers) >= count

    assert wait_until(are_there)
    return numbers


def test_what_has_arrived_is_told_once_and_without_waiting(asking: MakeAsking) -> None:
    late = threading.Event()

    def generate(url: str, json: Any) -> Any:
        if json["sampling_params"]["seed"] == 8:
            assert late.wait(PATIENCE)
        return completion(json)

    ask = asking(Servers(generate))
    pending = VLLMPending(ask.asker, requested(3))
    try:
        assert sorted(all_arrived(pending, 2)) == [0, 2]
        assert list(pending.arrived()) == []
        assert not pending.is_stuck
    finally:
        late.set()
    assert all_arrived(pending, 1) == [1]
    assert list(pending.arrived()) == []


def test_what_is_lost_is_stuck_until_it_is_repeated_with_its_seeds(asking: MakeAsking) -> None:
    seeds: list[int] = []

    def generate(url: str, json: Any) -> Any:
        seeds.append(json["sampling_params"]["seed"])
        return completion(json)

    servers = Servers(generate)
    servers.gone = {A, B}
    ask = asking(servers)
    pending = VLLMPending(ask.asker, requested(2))

    def is_stuck() -> bool:
        assert list(pending.arrived()) == []
        return pending.is_stuck

    assert wait_until(is_stuck)
    servers.gone = set()
    ask.asker.recover()  # as a weight sync does
    pending.repeat_lost()
    assert not pending.is_stuck
    assert sorted(all_arrived(pending, 2)) == [0, 1]
    assert sorted(seeds) == [7, 8]
    pending.repeat_lost()  # nothing is lost any more
    assert not pending.is_stuck


def test_what_is_lost_again_and_again_is_an_error(asking: MakeAsking) -> None:
    servers = Servers(lambda _, json: completion(json))
    servers.gone = {A, B}
    ask = asking(servers)
    pending = VLLMPending(ask.asker, requested(1))
    for _ in range(3):
        assert wait_until(lambda: not list(pending.arrived()) and pending.is_stuck)
        pending.repeat_lost()
    assert wait_until(lambda: not list(pending.arrived()) and pending.is_stuck)
    with pytest.raises(GenerationError, match="1 prompts were lost 4 times, although the servers came back"):
        pending.repeat_lost()


def test_a_request_that_failed_is_an_error_and_not_one_that_has_not_arrived(asking: MakeAsking) -> None:
    ask = asking(Servers(fails(Refused("too long", status=400))))
    pending = VLLMPending(ask.asker, requested(1))
    with pytest.raises(GenerationError, match="refuses: too long"):
        wait_until(lambda: bool(list(pending.arrived())))


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


def test_experts_are_read_only_if_all_servers_return_them(
    asking: MakeAsking, caplog: pytest.LogCaptureFixture
) -> None:
    ask = asking(Servers(lambda _, json: completion(json)))
    ask.asker._replay = SimpleNamespace(is_proven=True, top_k=2)
    returning = SimpleNamespace(returns_routes=True, num_hidden_layers=2)
    ask.fleet.infos = {A: returning, B: SimpleNamespace(returns_routes=False)}
    for _ in range(2):
        outcome = ask.ask()
        assert isinstance(outcome, Done)
        assert outcome.result[0].routes is None
    assert [record.getMessage().count(f"server at {B} does not return") for record in caplog.records] == [1]
    ask.fleet.infos[B] = returning
    outcome = ask.ask()  # of a server that promised experts, and returns none
    assert not isinstance(outcome, Done)
    ask.asker._replay.is_proven = False
    assert isinstance(ask.ask(), Done)
