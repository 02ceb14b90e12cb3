"""What a session answers: ids continue what is known of a conversation, and each turn is what was sent and sampled."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from prefrl import EpisodeError
from prefrl.generation.base import SamplingParams
from prefrl.rollout.gateway.formats import Asked, Reply, RequestError
from prefrl.rollout.gateway.messages import MESSAGES
from prefrl.rollout.gateway.policy import Policy, Shared
from prefrl.rollout.gateway.session import Session
from prefrl.types import Completion
from tests.unit.data.tool_templates import tool_template
from tests.unit.rollout.episodes.scripted import call, completion, hermes

ASK = {"role": "user", "content": "hi"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


class World:
    """A session whose model says texts that are written down.

    Args:
        texts: What it says, one after another. An exception is raised; a function is awaited.
    """

    def __init__(self, *texts: Any, template: Any = None, **policy: Any) -> None:
        self.template = template or hermes()
        self.sent: list[tuple[list[int], int, int]] = []  # ids, limit, seed
        self._texts = list(texts)
        options = {"max_tokens": 1000, "context_limit": None, **policy}
        self.session = Session(Policy(self.template, self._sample, **options), lambda _, number: 7 + number)

    async def _sample(self, ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
        self.sent.append((list(ids), max_tokens, seed))
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text
        if not isinstance(text, str):
            text = await text()
        return completion(self.template, text, max_tokens)

    def ask(self, messages: Sequence[Any], *, is_retry: bool = False, **asked: Any) -> Awaitable[Reply]:
        return self.session.answer(Asked(list(messages), **asked), is_retry=is_retry)

    def text(self, turn: int) -> str:
        return str(self.template.tokenizer.decode(self.sent[turn][0]))

    def continues(self, turn: int) -> bool:
        """Whether what was sent for a turn begins with the turn before it."""
        earlier = self.session.turns[turn - 1]
        row = [*earlier.sent_ids, *earlier.completion.token_ids]
        return self.session.turns[turn].sent_ids[: len(row)] == row


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def then(reply: Reply, *more: Any) -> list[Any]:
    return [reply.message, *more]


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (lambda said: said, True),
        (lambda said: {**said, "content": f"{said['content']} "}, False),
        (lambda said: {**said, "content": "other"}, False),
        (lambda said: {"role": "assistant", "content": said["content"]}, True),
    ],
)
def test_an_answer_is_known_again_only_as_it_was(change: Any, is_known: bool) -> None:
    world = World("one", "two")

    async def work() -> None:
        first = await world.ask([ASK])
        await world.ask([ASK, change(first.message), {"role": "user", "content": "more"}])

    run(work)
    assert world.continues(1) == is_known


def test_a_branch_and_a_compaction_begin_no_conversation_anew_that_they_do_not_begin() -> None:
    """The tokens of a conversation are counted from its first request; a summary is another conversation."""
    world = World("one", "two", "three", "four", max_tokens=100)
    system = {"role": "system", "content": "be brief"}

    async def work() -> None:
        first = await world.ask([system, ASK])
        await world.ask([system, ASK, *then(first, ASK)])
        rewritten = {"role": "assistant", "content": "rewritten"}
        await world.ask([system, ASK, rewritten, ASK])
        await world.ask([system, {"role": "user", "content": "summary"}])

    run(work)
    lengths = [len(ids) for ids, *_ in world.sent]
    assert [limit + length for (_, limit, _), length in zip(world.sent, lengths, strict=True)] == [
        lengths[0] + 100,
        lengths[0] + 100,
        lengths[0] + 100,
        lengths[3] + 100,
    ]
    assert world.session.parents == [-1, 0, 0, -1]


def test_what_a_turn_said_is_told_with_what_followed_it() -> None:
    world = World("one", "two", "three")
    other = {"role": "user", "content": "other"}

    async def work() -> None:
        first = await world.ask([ASK])
        await world.ask([ASK, *then(first, ASK)])
        await world.ask([ASK, *then(first, other)])

    run(work)
    assert world.session.parents == [-1, 0, 0], "a branch goes on from the turn where it leaves"
    said = [[message["content"] for message in messages] for messages in world.session.said]
    assert said == [["one", "hi"], ["two"], ["other", "three"]]


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_which_of_parallel_turns_ends_first_changes_nothing(ends: tuple[int, ...]) -> None:
    gates = [asyncio.Event() for _ in range(3)]

    def text(number: int) -> Any:
        async def said() -> str:
            await gates[number].wait()
            return f"number {number}"

        return said

    world = World("first", *map(text, range(3)), "behind 1", "last")
    session = world.session
    session._seed = lambda ids, number: len(ids)

    async def work() -> None:
        begun = [ASK, *then(await world.ask([ASK]))]
        asks = [[*begun, {"role": "user", "content": "and so on " * (3 - number)}] for number in range(3)]
        asked = [asyncio.ensure_future(world.ask(messages)) for messages in asks]
        await asyncio.sleep(0)
        for number in ends:
            gates[number].set()
            await asked[number]
        await world.ask([*asks[1], *then(asked[1].result(), ASK)])
        gates[2].set()
        await asked[2]
        session.credit(0.5)
        await world.ask([{"role": "user", "content": "summary"}])
        session.credit(0.25)
        await session.close()

    run(work)
    said = [[message["content"].replace("and so on ", "?") for message in messages] for messages in session.said]
    assert said[:3] == [["first", "?"], ["number 2"], ["??", "number 1", "hi"]]
    assert said[3:] == [["behind 1"], ["???", "number 0"], ["summary", "last"]]
    assert session.parents == [-1, 0, 0, 2, 0, -1]
    assert [messages[-1]["content"] for messages in session.conversations] == [
        world.template.tokenizer.decode(turn.completion.token_ids[:-1]) for turn in session.turns
    ]
    assert session.turn_rewards == [0, 0, 0, 0, 0.5, 0.25]


def test_chats_are_read_beside_the_event_loop_in_the_order_in_which_they_come() -> None:
    """Equal requests differ in their seeds by their order, and no more are answered than there may be turns."""
    world = World("one", "two", max_turns=2)
    read, may_go_on, threads = world.session._context, threading.Event(), []

    def context(request: Any) -> list[int]:
        threads.append(threading.current_thread())
        assert may_go_on.wait(20), "the event loop waits"
        return read(request)

    async def work() -> Any:
        asked = [asyncio.ensure_future(world.ask([ASK], max_tokens=limit)) for limit in (5, 6, 7)]
        await asyncio.sleep(0.05)
        may_go_on.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    world.session._context = context
    *_, refused = run(work)
    assert threading.main_thread() not in threads
    assert [(limit, seed) for _, limit, seed in world.sent] == [(5, 7), (6, 8)]
    assert isinstance(refused, RequestError)


def test_a_request_goes_on_from_what_had_ended_when_it_came() -> None:
    """Not from what ends while it is read, which is chance."""
    world = World("one", "two")
    find, may_go_on, num_read = world.session._request, threading.Event(), []

    def request(*arguments: Any) -> Any:
        num_read.append(1)
        assert len(num_read) == 1 or may_go_on.wait(20)
        return find(*arguments)

    async def work() -> None:
        first, second = (asyncio.ensure_future(world.ask([ASK])) for _ in range(2))
        await first
        may_go_on.set()
        await second

    world.session._request = request
    run(work)
    assert world.session.parents == [-1, -1]


# Requests that are asked again.


def test_a_retry_gets_the_stored_answer_also_while_it_is_sampled() -> None:
    async def work() -> None:
        gate = asyncio.Event()

        async def slow() -> str:
            await gate.wait()
            return "one"

        world = World(slow, "two")
        first = asyncio.ensure_future(world.ask([ASK]))
        again = asyncio.ensure_future(world.ask([ASK], is_retry=True))
        await asyncio.sleep(0)
        gate.set()
        replies = [await first, await again, await world.ask([ASK], is_retry=True)]
        assert [reply.id for reply in replies] == [replies[0].id] * 3
        assert len(world.session.turns) == 1
        assert (await world.ask([ASK])).message["content"] == "two", "the same request is a new one"
        assert [seed for *_, seed in world.sent] == [7, 8]

    asyncio.run(work())


def test_a_client_that_hung_up_and_asks_again_without_saying_so_gets_the_answer_it_missed() -> None:
    async def work() -> None:
        gate = asyncio.Event()

        async def slow() -> str:
            await gate.wait()
            return "one"

        world = World(slow, "two")
        first = asyncio.ensure_future(world.ask([ASK]))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.set()
        assert (await world.ask([ASK])).message["content"] == "one"
        assert (await world.ask([ASK])).message["content"] == "two"
        assert len(world.session.turns) == 2

    asyncio.run(work())


def test_an_answer_that_a_retry_got_is_not_given_away_again() -> None:
    async def work() -> None:
        gate = asyncio.Event()

        async def slow() -> str:
            await gate.wait()
            return "one"

        world = World(slow, "two")
        first = asyncio.ensure_future(world.ask([ASK]))
        again = asyncio.ensure_future(world.ask([ASK], is_retry=True))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert (await again).message["content"] == "one"
        assert (await world.ask([ASK])).message["content"] == "two"

    asyncio.run(work())


def test_a_request_that_failed_is_sampled_when_it_is_asked_again() -> None:
    world = World(OSError("gone"), "one")

    async def work() -> str:
        with pytest.raises(OSError, match="gone"):
            await world.ask([ASK])
        return str((await world.ask([ASK], is_retry=True)).message["content"])

    assert run(work) == "one"
    assert isinstance(world.session.failure, OSError), "no fault of the agent"


def test_a_request_that_is_open_at_the_end_is_told_so() -> None:
    async def work() -> None:
        async def never() -> str:
            await asyncio.Event().wait()
            return ""

        world = World(never)
        asked = asyncio.ensure_future(world.ask([ASK]))
        await asyncio.sleep(0)
        await world.session.close()
        for late in (asked, world.ask([ASK])):
            with pytest.raises(RequestError, match="is over") as told:
                await late
            assert told.value.status == 410
        assert not world.session.turns

    asyncio.run(work())


# Where an answer ends.


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    world = World("think Observation: made up", "two", "three")

    async def work() -> Reply:
        reply = await world.ask([ASK], stop=("nothing", "Observation:"))
        await world.ask([ASK, *then(reply, ASK)])
        await world.ask([ASK, {"role": "assistant", "content": "think Observation:"}, ASK])
        return reply

    reply = run(work)
    assert (reply.message["content"], reply.ending, reply.stop_string) == ("think ", "stop_string", "Observation:")
    (first, cut, whole), tokenizer = world.session.turns, world.template.tokenizer
    assert tokenizer.decode(first.completion.token_ids) == "think Observation:"
    assert first.completion.finish_reason == "stop_string"
    assert len(first.completion.logprobs) == len(first.completion.trainable) == len(first.completion.token_ids)
    assert world.session.num_dropped == len(" made up") + 1, "and the token that ends the turn"
    assert "Observation" not in tokenizer.decode(cut.sent_ids), "the client cut it off"
    row = [*first.sent_ids, *first.completion.token_ids]
    assert whole.sent_ids[: len(row)] == row


def test_the_limit_of_a_request_ends_its_answer() -> None:
    world = World("one two")
    reply = run(lambda: world.ask([ASK], max_tokens=3))
    assert (reply.ending, reply.num_sampled) == ("length", 3)


@pytest.mark.parametrize("limits", [{"max_tokens": 10}, {"max_tokens": 1000, "context_limit": 60}])
def test_an_overflow_is_told_in_the_words_that_frameworks_know(limits: dict[str, int]) -> None:
    world = World("one", "two", "three", "four", **limits)

    async def work() -> RequestError:
        messages = [ASK]
        for _ in range(len(limits)):
            messages += then(await world.ask(messages), ASK)
        with pytest.raises(RequestError) as told:
            await world.ask(messages)
        return told.value

    error = run(work)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "maximum context length is" in str(error)
    assert world.session.refusal[0] == ("context" if "context_limit" in limits else "max_tokens")
    assert "prompt is too long: " in MESSAGES.error(error)["error"]["message"]
    ids, limit, _ = world.sent[-1]
    longest = min(len(world.sent[0][0]) + limits["max_tokens"], limits.get("context_limit", 10**6))
    assert len(ids) + limit == longest


def test_turns_are_limited_and_no_client_tries_again() -> None:
    world = World("one", max_turns=1)

    async def work() -> RequestError:
        await world.ask([ASK])
        with pytest.raises(RequestError, match="at most 1 turns") as told:
            await world.ask([ASK])
        return told.value

    assert run(work).status == 400, "429 would be tried again"
    assert world.session.refusal[0] == "max_turns"


# What clients ask for.


def test_each_sampling_option_that_is_overruled_is_told_once_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    shared, sampling = Shared(), SamplingParams(num_samples=1, max_tokens=5, temperature=0.7)
    silent = {"temperature": 0.7, "top_p": 1, "top_k": -1, "presence_penalty": 0, "min_p": 0.0, "logit_bias": {}}

    async def work() -> None:
        for asked in (silent, {"temperature": 0.2}, {"temperature": 0.3, "seed": 3}):
            await World("one", sampling=sampling, shared=shared).ask([ASK], sampling=asked)

    with caplog.at_level(logging.WARNING):
        run(work)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("an agent asks for temperature=0.2,")
    assert "(temperature=0.7)" in told[0]
    assert told[1].startswith("an agent asks for seed=3,")


def test_tools_that_the_template_cannot_show_are_refused() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    world = World(template=tool_template(plain))
    with pytest.raises(RequestError, match="renders no tool calls") as told:
        run(lambda: world.ask([ASK], tools=[SEARCH]))
    assert told.value.status == 400


def test_a_message_that_the_template_drops_is_refused() -> None:
    silent = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    world = World(template=tool_template(silent))
    with pytest.raises(RequestError, match="drops message 0"):
        run(lambda: world.ask([{"role": "system", "content": "be brief"}, ASK]))


def test_calls_are_read_by_the_parser_of_the_options() -> None:
    def parser(text: str) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"function": {"name": "search", "arguments": {"q": text[:3]}}}]}

    reply = run(lambda: World("one", tool_parser=parser).ask([ASK], tools=[SEARCH]))
    assert reply.calls[0]["function"] == {"name": "search", "arguments": {"q": "one"}}


def test_a_reader_of_calls_is_found_once_for_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefrl.rollout.gateway import policy

    found: list[Any] = []
    original = policy.tool_call_reader
    monkeypatch.setattr(policy, "tool_call_reader", lambda *args, **more: found.append(1) or original(*args, **more))
    shared = Shared()
    for _ in range(2):
        reply = run(lambda: World(call("search", q="a"), shared=shared).ask([ASK], tools=[SEARCH]))
        assert reply.calls[0]["function"] == {"name": "search", "arguments": {"q": "a"}}
    assert len(found) == 1


def test_rewards_credit_the_last_turn() -> None:
    world = World("one", "two")
    with pytest.raises(EpisodeError, match="has not answered yet"):
        world.session.credit(1.0)

    async def work() -> None:
        await world.ask([ASK])
        world.session.credit(0.5)
        world.session.credit(0.25)
        await world.ask([ASK])
        world.session.credit(-1)

    run(work)
    assert world.session.turn_rewards == [0.75, -1.0]
    with pytest.raises(EpisodeError, match="finite"):
        world.session.credit(float("nan"))


def test_a_conversation_that_ends_with_the_assistant_is_refused() -> None:
    with pytest.raises(RequestError, match="nothing to answer"):
        run(lambda: World().ask([ASK, {"role": "assistant", "content": "one"}]))
