"""Whatever a client does with its history: each id that was sampled is trained where it was sampled, or is dropped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.data.chat import ChatTemplate, special_tokens
from prefrl.rollout.batches import responses_of, sampled_batch
from prefrl.rollout.gateway.formats import Asked, RequestError
from prefrl.rollout.gateway.session import Policy, Session
from prefrl.types import Completion, Rollout
from tests.contract import episodes

TEMPLATES = {
    forgets: ChatTemplate(tokenizer, tuple(special_tokens(tokenizer)))
    for forgets in (False, True)
    for tokenizer in [episodes.tokenizer(forgets=forgets)]
}


class Client:
    """A client that asks at random, from histories that it edits.

    Args:
        random: Decides.
        forgets: Whether the template cuts earlier answers.
    """

    def __init__(self, random: random.Random, *, forgets: bool) -> None:
        self._random = random
        self.sampled: list[tuple[list[int], Completion]] = []  # all that the sampler returned
        policy = Policy(TEMPLATES[forgets], self._sample, max_tokens=120, context_limit=200, max_turns=12)
        self.session = Session(policy, lambda _, number: number)
        self._histories: list[list[Any]] = [[{"role": "user", "content": "?"}]]
        self._is_open = asyncio.Event()

    async def _sample(self, ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
        await asyncio.sleep(0)
        count = self._random.randint(1, min(max_tokens, 8))
        found = [self._random.randrange(4, 99) for _ in range(count)]
        if self._random.random() < 0.7:
            found[-1] = 1  # the end token
        # No two tokens have the same log-prob.
        logprobs = [-(len(self.sampled) * 100.0 + place) / 4096 for place in range(count)]
        reason: Any = "stop" if found[-1] == 1 else "length"
        completion = Completion(found, reason, logprobs, [True] * count, [0] * count)
        self.sampled.append((list(ids), completion))
        return completion

    async def act(self) -> None:
        """Ask once or several times."""
        messages = self._edited(list(self._random.choice(self._histories)))
        asked = Asked(messages, max_tokens=self._random.choice([None, 3]), stop=self._random.choice([(), ("a", "?")]))
        kind = self._random.choice(["once", "once", "retry", "parallel", "hang up"])
        if kind == "hang up":
            work = asyncio.ensure_future(self._ask(asked))
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        works = [self._ask(asked, is_retry=kind == "retry")]
        if kind == "parallel":
            works += [self._ask(asked), self._ask(asked, is_retry=True)]
        await asyncio.gather(*works)

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

    async def _ask(self, asked: Asked, *, is_retry: bool = False) -> None:
        try:
            reply = await self.session.answer(asked, is_retry=is_retry)
        except RequestError:
            return
        self._histories.append([*asked.messages, reply.message])


def _check(client: Client) -> None:
    turns = client.session.turns
    num_sampled = sum(len(completion.token_ids) for _, completion in client.sampled)
    num_kept = sum(len(turn.completion.token_ids) for turn in turns)
    assert num_sampled == num_kept + client.session.num_dropped
    left = list(client.sampled)
    for turn in turns:
        count = len(turn.completion.token_ids)
        place = next(
            i
            for i, (ids, whole) in enumerate(left)
            if ids == turn.sent_ids
            and whole.token_ids[:count] == turn.completion.token_ids
            and whole.logprobs[:count] == turn.completion.logprobs
        )
        del left[place]
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
