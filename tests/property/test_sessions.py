"""Whatever a client does with its history: each id that was sampled is trained where it was sampled, or is dropped.

What the policy has said is known again, a retry samples nothing, and seeds do not depend on the order of requests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.data.chat import ChatTemplate, common_prefix_length, special_tokens
from prefrl.rollout.batches import responses_of, sampled_batch
from prefrl.rollout.gateway.formats import Asked, RequestError
from prefrl.rollout.gateway.policy import Policy, Shared
from prefrl.rollout.gateway.session import Session
from prefrl.types import Completion, Rollout
from tests.contract import episodes


def template(*, forgets: bool) -> ChatTemplate:
    """Its tokenizer encodes some texts as one token that the policy may also say as two."""
    tokenizer = episodes.tokenizer(forgets=forgets)
    tokenizer.add_tokens(PAIRS)
    return ChatTemplate(tokenizer, tuple(special_tokens(tokenizer)))


PAIRS = ["ab", "!!"]
TEMPLATES = {forgets: template(forgets=forgets) for forgets in (False, True)}
# What is sampled for, and the turns that had ended when it was asked for.
ASKED: ContextVar[tuple[Asked, int]] = ContextVar("ASKED")
# Most of what the policy says.
AMBIGUOUS = TEMPLATES[True].tokenizer.convert_tokens_to_ids(["a", "b", "!", *PAIRS])


class InPlace(Executor):
    """Does at once what it is asked for: when a thread ends depends on the machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Client:
    """A client that asks at random, from histories that it edits.

    Args:
        random: Decides.
        forgets: Whether the template cuts earlier answers.
    """

    def __init__(self, random: random.Random, *, forgets: bool) -> None:
        self._random = random
        self.forgets = forgets
        self.asked: list[tuple[Asked, int]] = []  # requests that were answered, and the numbers of their turns
        self.unheard: list[Asked] = []  # requests whose answers were not waited for, each of which a later one may get
        self.seeds: list[tuple[tuple[int, ...], int]] = []  # the ids of each request, and the number of its seed
        # All that the sampler returned: the ids that were sent, the completion, and `ASKED`.
        self.sampled: list[tuple[list[int], Completion, tuple[Asked, int]]] = []
        shared = Shared(thread=InPlace())
        policy = Policy(
            TEMPLATES[forgets], self._sample, max_tokens=120, context_limit=200, max_turns=12, shared=shared
        )
        self.session = Session(policy, lambda _, number: number)
        self._histories: list[list[Any]] = [[{"role": "user", "content": "?"}]]
        self._is_open = asyncio.Event()

    async def _sample(self, ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
        self.seeds.append((tuple(ids), seed))
        await asyncio.sleep(0)
        count = self._random.randint(1, min(max_tokens, 8))
        found = [self._random.choice([self._random.randrange(4, 99), *AMBIGUOUS]) for _ in range(count)]
        if self._random.random() < 0.7:
            found[-1] = 1  # the end token
        # No two tokens have the same log-prob.
        logprobs = [-(len(self.sampled) * 100.0 + place) / 4096 for place in range(count)]
        reason: Any = "stop" if found[-1] == 1 else "length"
        completion = Completion(found, reason, logprobs, [True] * count, [0] * count)
        self.sampled.append((list(ids), completion, ASKED.get()))
        return completion

    async def act(self) -> None:
        """Ask once or several times."""
        if self.asked and self._random.random() < 0.2:
            asked = self._random.choice(self.asked)[0]
        else:
            messages = self._edited(list(self._random.choice(self._histories)))
            limit, stop = self._random.choice([None, 3]), self._random.choice([(), ("a", "?")])
            asked = Asked(messages, max_tokens=limit, stop=stop)
        kind = self._random.choice(["once", "once", "retry", "parallel", "hang up"])
        if kind == "hang up":
            self.unheard.append(asked)
            work = asyncio.ensure_future(self._ask(asked))
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        earlier = [turn for one, turn in self.asked if one == asked]
        num_sampled = self._num_sampled(asked)
        works = [self._ask(asked, is_retry=kind == "retry")]
        if kind == "parallel":
            works += [self._ask(asked), self._ask(asked, is_retry=True)]
        turns = await asyncio.gather(*works)
        if kind == "parallel":
            assert turns[2] in turns[:2], "the retry has an answer of its own"
        if kind == "retry" and earlier and asked not in self.unheard:
            assert turns[0] in earlier
            assert self._num_sampled(asked) == num_sampled, "a retry is sampled"

    def _num_sampled(self, asked: Asked) -> int:
        return sum(one == asked for *_, (one, _) in self.sampled)

    def _edited(self, messages: list[Any]) -> list[Any]:
        place = self._random.randrange(len(messages))
        kind = self._random.choice(["keep", "keep", "edit", "drop", "fork", "compact"])
        if kind == "edit":
            messages[place] = {**messages[place], "content": self._random.choice(["!", "", "ab", " "])}
        elif kind == "drop":
            del messages[place]
        elif kind == "fork":
            messages = messages[: place + 1]
        elif kind == "compact":
            messages = [{"role": "system", "content": "so far"}, *messages[-2:]]
        return [*messages, {"role": "user", "content": self._random.choice(["?", "!!"])}]

    async def _ask(self, asked: Asked, *, is_retry: bool = False) -> int | None:
        """The number of the turn that is the answer; None: it was refused."""
        ASKED.set((asked, len(self.session.turns)))
        try:
            reply = await self.session.answer(asked, is_retry=is_retry)
        except RequestError:
            return None
        self._histories.append([*asked.messages, reply.message])
        turn = int(reply.id, 16)
        self.asked.append((asked, turn))
        if not asked.stop:  # which cuts what the client is told
            assert self.session.conversations[turn] == [*asked.messages, reply.message]
        return turn


def _check(client: Client) -> None:
    turns = client.session.turns
    num_sampled = sum(len(completion.token_ids) for _, completion, _ in client.sampled)
    num_kept = sum(len(turn.completion.token_ids) for turn in turns)
    assert num_sampled == num_kept + client.session.num_dropped
    for ids in {ids for ids, _ in client.seeds}:
        numbers = [number for one, number in client.seeds if one == ids]
        assert numbers == list(range(len(numbers))), "a seed depends on other requests"
    left = list(client.sampled)
    for number, turn in enumerate(turns):
        count = len(turn.completion.token_ids)
        place = next(
            i
            for i, (ids, whole, _) in enumerate(left)
            if ids == turn.sent_ids
            and whole.token_ids[:count] == turn.completion.token_ids
            and whole.logprobs[:count] == turn.completion.logprobs
        )
        _check_parent(client, number, left.pop(place)[2][1])
    if not turns:
        return
    rollout = Rollout(turns, {}, 0)
    batch = sampled_batch([rollout], mask_truncated=False)
    logprobs, ids = (values[batch.trainable].tolist() for values in (batch.sampling_logprobs, batch.response_ids))
    trained = dict(zip(logprobs, ids, strict=True))
    assert len(trained) == batch.num_trainable == num_kept, "an id is trained twice or never"
    for turn in turns:
        assert [trained[value] for value in turn.completion.logprobs] == turn.completion.token_ids
    for response in responses_of(rollout):
        places = zip(response.turn, response.trainable, strict=True)
        own = [(number, place) for place, (number, is_trained) in enumerate(places) if is_trained]
        for number, place in reversed(own):
            if (number, place - 1) not in own:  # the first id of a turn stands behind the ids that were sent for it
                assert [*response.prompt_ids, *response.token_ids[:place]] == turns[number].sent_ids


def _check_parent(client: Client, number: int, num_known: int) -> None:
    """Whether a turn goes on from the turn that has most of its conversation, and sends its ids again.

    Args:
        client: Whose session it is.
        number: Of the turn.
        num_known: The turns that had ended when it was asked for.
    """
    session = client.session
    *seen, _ = session.conversations[number]
    shared = {one: common_prefix_length(seen, session.conversations[one]) for one in range(num_known)}
    # A conversation is left by what has not all of its first request.
    shared = {
        one: count for one, count in shared.items() if count >= len(session.conversations[_root(session, one)]) - 1
    }
    parent = session.parents[number]
    if not shared:
        assert parent == -1
        return
    assert shared[parent] == max(shared.values()), "another turn has more of the conversation"
    if client.forgets or shared[parent] < len(session.conversations[parent]):
        return
    grown = [session.turns[one] for one, count in shared.items() if count == len(session.conversations[one])]
    rows = [turn.sent_ids + turn.completion.token_ids for turn in grown]
    if all(one > 6 or one == 1 for turn in grown for one in turn.completion.token_ids):  # else a header was sampled
        sent = session.turns[number].sent_ids
        assert any(sent[: len(row)] == row for row in rows), "a conversation that only grew is not continued"


def _root(session: Session, number: int) -> int:
    while session.parents[number] >= 0:
        number = session.parents[number]
    return number


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 10), st.booleans())
@settings(max_examples=60)
def test_sampled_ids_are_trained_or_dropped_whatever_the_client_does(
    random: random.Random, forgets: bool, num_requests: int, is_cut: bool
) -> None:
    async def played() -> Client:
        client = Client(random, forgets=forgets)
        for _ in range(num_requests):
            await client.act()
        if is_cut:  # the agent is ended while it asks
            late = asyncio.ensure_future(client.act())
            await asyncio.sleep(0)
            await client.session.close()
            await late
        await client.session.close()
        return client

    _check(asyncio.run(played()))
