"""The conversations of one agent: each request continues what is known of them, to the token.

What a client sends is compared with the messages of earlier turns. The longest common beginning says which turn it
goes on from, and `next_context` which ids are sent. So edited histories, compaction, sub-agents and parallel requests
need no case of their own: each turn is the ids that were sent and those that were sampled, and turns with common
beginnings are one forest. An answer is known again only if the client sends it as it was; another text is text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from prefrl.data.chat import ChatTemplate, common_prefix_length
from prefrl.data.formats import Message
from prefrl.data.next_turn import Answer, first_context, next_context, said_text
from prefrl.data.tool_calls import ToolCallReader
from prefrl.errors import ConfigError, DataError, EpisodeError
from prefrl.rollout.gateway.formats import Asked, ContextOverflow, Ending, EpisodeOver, Reply, RequestError
from prefrl.rollout.gateway.policy import Policy
from prefrl.rollout.turns import call_id, first_tokens, num_thought, read_turn, with_new_routes
from prefrl.types import Completion, StopReason, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Node:
    """A turn, and the conversation that it stands in."""

    number: int  # of the turn, in the order in which they ended
    parent: int  # number of the turn that it goes on from; -1: it begins a conversation
    after: int  # turns that had ended when it was asked for
    seed: int
    seen: list[Message]  # what it saw, and its answer
    answers: list[Answer]  # of the conversation, in order; the last one is its own
    tools: str  # of the request
    root: int  # messages of the conversation's first request
    start: int  # tokens of the conversation's first request


@dataclass(frozen=True)
class Leaf:
    """A conversation up to an answer that no other conversation has.

    Args:
        prompt: The messages before its first answer.
        completion: The messages from there on.
        tools: Of the last request, as JSON.
        numbers: Of its turns among those of the session, in the order in which these ended.
        completions: That were sampled in these turns.
    """

    prompt: list[Message]
    completion: list[Message]
    tools: str
    numbers: list[int]
    completions: list[Completion]


@dataclass(frozen=True)
class _Request:
    """A request, and what it goes on from."""

    asked: Asked
    tools: str
    node: _Node | None  # the turn whose answers it has; None: it has none
    parent: _Node | None  # the turn of the conversation that it goes on; None: it begins one
    template: ChatTemplate
    reader: ToolCallReader | None


class Session:
    """What one agent asks, from its beginning to its end. It is only used on one event loop, but for `credit`.

    Args:
        policy: Answers.
        seed: Gives the seed of a turn, from the ids that are sent and how often they were sent before.
    """

    def __init__(self, policy: Policy, seed: Callable[[Sequence[int], int], int]) -> None:
        self._policy = policy
        self._seed = seed
        self.turns: list[Turn] = []  # in the order in which they ended; `close` rearranges them
        self.num_calls = self.num_failed_calls = 0
        self.asked: Asked | None = None  # the last request for which a turn is sampled, or was
        self.num_dropped = 0  # tokens that were sampled behind a stop string
        self.is_over = False
        # The limit at which the last request was refused, and what it was told; None: it was answered.
        self.refusal: tuple[StopReason, str] | None = None
        self.failure: Exception | None = None  # of the sampler or a parser: no fault of the agent
        self._credits: list[tuple[int, float]] = []  # turns that had ended, reward of the last of them
        self._nodes: list[_Node] = []  # of the turns
        self._sent: list[list[int]] = []  # the ids of every request
        self._open: set[asyncio.Future[Reply]] = set()
        self._last: dict[str, asyncio.Future[Reply]] = {}  # the last answer to each request
        self._unheard: dict[str, list[asyncio.Future[Reply]]] = {}  # those whose clients hung up, by request
        self._heard: set[asyncio.Future[Reply]] = set()
        # Requests are read one after another, in the order in which they come: equal ones are numbered, see `seed`.
        self._reading = asyncio.Lock()

    def credit(self, reward: float) -> None:
        """Add to the reward of the last turn. May be called from any thread.

        Raises:
            EpisodeError: There is no turn yet, or the reward is not a finite number.
        """
        if not self.turns:
            raise EpisodeError("client.reward: the policy has not answered yet, so there is no turn to credit")
        if not math.isfinite(reward):
            raise EpisodeError(f"client.reward({reward}): must be a finite number")
        self._credits.append((len(self.turns), float(reward)))

    @property
    def turn_rewards(self) -> list[float]:
        """The sum of `credit` for each turn."""
        rewards = [0.0] * len(self.turns)
        for num_ended, reward in tuple(self._credits):
            rewards[max(i for i, node in enumerate(self._nodes) if node.number < num_ended)] += reward
        return rewards

    def leaves(self) -> list[Leaf]:
        """The conversations that no other goes on from, in the order in which they ended."""
        by_number = {node.number: node for node in self._nodes}
        before: dict[int, _Node] = {}  # by number of a turn: the turn behind which its whole conversation stands
        for node in self._nodes:
            parent = by_number.get(node.parent)
            if parent is not None and node.seen[: len(parent.seen)] == parent.seen:
                before[node.number] = parent
        gone_on = {node.number for node in before.values()}
        found = []
        for last in sorted(by_number.keys() - gone_on):
            numbers, node = [last], by_number[last]
            while numbers[0] in before:
                numbers.insert(0, before[numbers[0]].number)
            completions = [by_number[number].answers[-1].turn.completion for number in numbers]
            first = [message["role"] for message in node.seen].index("assistant", node.root)
            found.append(Leaf(node.seen[:first], node.seen[first:], node.tools, numbers, completions))
        return found

    @property
    def conversations(self) -> list[list[Message]]:
        """That of each turn, with its answer."""
        return [node.seen for node in self._nodes]

    @property
    def parents(self) -> list[int]:
        """The turn that each goes on from; -1: it begins a conversation."""
        places = {node.number: i for i, node in enumerate(self._nodes)}
        return [places.get(node.parent, -1) for node in self._nodes]

    @property
    def said(self) -> list[list[Message]]:
        """For each turn: what is new in its conversation, its answer, and what the first turn behind it saw next."""
        said: list[list[Message]] = []
        has_next: set[int] = set()
        for node, parent in zip(self._nodes, self.parents, strict=True):
            *asked, message = node.seen
            before = [] if parent < 0 else self._nodes[parent].seen
            known = common_prefix_length(asked, before)
            new = asked[known:] if said else []  # the first request is the prompt
            if parent >= 0 and known == len(before) and parent not in has_next:
                said[parent] += new
                new = []
            has_next.add(parent)
            said.append([*new, message])
        return said

    @property
    def num_open(self) -> int:
        """Answers that are being sampled."""
        return len(self._open)

    async def answer(self, asked: Asked, *, is_retry: bool = False) -> Reply:
        """The answer to a request.

        If the client says that it asks again, or hung up before it was answered and asks the same again, this is the
        answer to the request before, also while that is still sampled.

        Raises:
            RequestError: It cannot be answered.
        """
        key = _digest([asked.messages, asked.tools, asked.max_tokens, asked.stop, asked.sampling])
        work = self._earlier(key, is_retry)
        if work is None:
            work = self._last[key] = asyncio.ensure_future(self._answer(asked, after=len(self.turns)))
            self._open.add(work)
            work.add_done_callback(self._ended)
        try:
            reply = await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise EpisodeOver() from None
            self._unheard.setdefault(key, []).append(work)
            raise
        self._heard.add(work)
        return reply

    async def num_tokens(self, asked: Asked) -> int:
        """How many ids would be sent for a request.

        Raises:
            RequestError: It cannot be answered.
        """
        if not asked.messages:
            raise RequestError("messages: there are none")
        return len((await self._read(asked, len(self.turns)))[1])

    async def close(self) -> None:
        """End the session: requests that are not answered yet never are.

        Which of the turns that are sampled at the same time ends first is chance, so these get an order of their own.
        """
        self.is_over = True
        for work in tuple(self._open):
            work.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        turns = dict(zip((node.number for node in self._nodes), self.turns, strict=True))
        self._nodes = _arranged(self._nodes)
        ordered = [turns[node.number] for node in self._nodes]
        self.turns = [with_new_routes(turn, before) for turn, before in zip(ordered, [None, *ordered], strict=False)]

    def _earlier(self, key: str, is_retry: bool) -> asyncio.Future[Reply] | None:
        """The answer, or what will be one, that a request asks for again; None: it asks for a new one."""
        unheard = [work for work in self._unheard.pop(key, []) if work not in self._heard]
        again = [self._last[key]] if is_retry and key in self._last else []
        for work in (*unheard, *again):
            if not work.done() or not (work.cancelled() or work.exception()):
                self._unheard[key] = [one for one in unheard if one is not work]
                return work
        return None

    def _ended(self, work: asyncio.Future[Reply]) -> None:
        self._open.discard(work)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, Exception) and not isinstance(error, RequestError):
            self.failure = self.failure or error

    async def _answer(self, asked: Asked, *, after: int) -> Reply:
        if self.is_over:
            raise EpisodeOver()
        async with self._reading:
            self._check(asked)
            sample = self._policy.sampler(asked)
            request, token_ids = await self._read(asked, after)
            start = len(token_ids) if request.parent is None else request.parent.start
            room = self._room(start, token_ids)
            self.refusal = None
            number = sum(ids == token_ids for ids in self._sent)
            self._sent.append(token_ids)
            self.asked = asked
        limit = room if asked.max_tokens is None else min(room, asked.max_tokens)
        seed = self._seed(token_ids, number)
        completion = await sample(token_ids, limit, seed)
        return self._note(request, Turn(token_ids, completion), start, after=after, seed=seed)

    def _check(self, asked: Asked) -> None:
        """Refuse what cannot be answered.

        Raises:
            RequestError: There is nothing to answer, or the turns are used up.
        """
        if not asked.messages or asked.messages[-1]["role"] == "assistant":
            raise RequestError("messages: the last one must not be of the assistant, or there is nothing to answer")
        limit = self._policy.max_turns
        if limit is not None and len(self._sent) >= limit:
            # No status that clients take for a reason to try again.
            raise self._refused("max_turns", RequestError(f"this episode may have at most {limit} turns (max_turns)"))

    async def _read(self, asked: Asked, known: int) -> tuple[_Request, list[int]]:
        """What a request goes on from, among the first `known` turns, and the ids to send for it.

        A template renders a long conversation several times, which takes a tenth of a second or more: a thread does
        it, so that the event loop goes on with other sessions. The thread changes nothing of the session.

        Raises:
            RequestError: The chat template cannot show it.
        """

        def read() -> tuple[_Request, list[int]]:
            request = self._request(asked, self._nodes[:known])
            return request, self._context(request)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._policy.shared.thread, read)
        except (ConfigError, DataError) as error:
            raise RequestError(str(error)) from error

    def _refused(self, reason: StopReason, error: RequestError) -> RequestError:
        self.refusal = reason, str(error)
        return error

    def _request(self, asked: Asked, nodes: Sequence[_Node]) -> _Request:
        """What a request goes on from: the turn that has most of it.

        The rest of a conversation's tokens are for what has all of its first request; the ids of answers are sent
        again to whoever sends the answers.
        """
        tools = json.dumps(asked.tools, sort_keys=True)
        template, reader = replace(self._policy.template, tools=asked.tools or None), self._policy.reader(asked)
        best: tuple[int, int] = (0, 0)
        node = parent = None
        longest = 0
        for one in nodes:
            common = common_prefix_length(asked.messages, one.seen)
            if common >= one.root and common > longest:  # of equal ones, the first: others went on from it
                parent, longest = one, common
            num_answers = sum(answer.message in asked.messages for answer in one.answers) if one.tools == tools else 0
            if num_answers and (common, num_answers) > best:
                node, best = one, (common, num_answers)
        return _Request(asked, tools, node, parent, template, reader)

    def _context(self, request: _Request) -> list[int]:
        """The ids to send.

        Raises:
            DataError: The chat template refuses or drops a message.
        """
        node, messages, template = request.node, request.asked.messages, request.template
        if node is None:
            return first_context(template, messages)
        reasoning = self._policy.reasoning
        context = next_context(template, messages, seen=node.seen, answers=node.answers, reasoning=reasoning)
        return context.token_ids

    def _room(self, start: int, token_ids: list[int]) -> int:
        """How many tokens may be sampled.

        Raises:
            ContextOverflow: None.
        """
        length, limit = len(token_ids), self._policy.context_limit
        longest, reason = start + self._policy.max_tokens, "max_tokens"
        if limit is not None and limit < longest:
            longest, reason = limit, "context"
        if longest <= length:
            raise self._refused(cast("StopReason", reason), ContextOverflow(length, longest))
        return longest - length

    def _note(self, request: _Request, turn: Turn, start: int, *, after: int, seed: int) -> Reply:
        """Note a turn; returns what the client is told of it."""
        asked, template, number = request.asked, request.template, len(self.turns)
        turn, stop = self._stopped(template, turn, asked.stop)
        parsed, message = read_turn(template, request.reader, turn, lambda call: call_id(number + 1, call))
        self.num_calls += len(parsed.calls)
        self.num_failed_calls += sum(call.problem is not None for call in parsed.calls)
        seen = [*asked.messages, message]
        answers = [*([] if request.node is None else request.node.answers), Answer(message, turn)]
        parent = request.parent
        root = len(asked.messages) if parent is None else parent.root
        before = -1 if parent is None else parent.number
        self._nodes.append(_Node(number, before, after, seed, seen, answers, request.tools, root, start))
        self.turns.append(turn)
        if stop is not None:
            message = {**message, "content": message["content"].partition(stop)[0]}
        reason = turn.completion.finish_reason
        ending: Ending = "stop_string" if stop is not None else "length" if reason == "length" else "stop"
        ids = len(turn.sent_ids), len(turn.completion.token_ids), num_thought(template, turn, message)
        return Reply(f"{number:08x}", message, ending, stop, *ids, created=int(time.time()))

    def _stopped(self, template: ChatTemplate, turn: Turn, stops: Sequence[str]) -> tuple[Turn, str | None]:
        """The turn up to the token that completes the first stop string, as if it had ended there; and the string."""
        num_tokens = len(turn.completion.token_ids)

        def found(count: int) -> str | None:
            text = said_text(template, turn if count == num_tokens else first_tokens(turn, count))
            return min((one for one in stops if one in text), key=text.index, default=None)

        if not stops or found(num_tokens) is None:
            return turn, None
        count = bisect_left(range(num_tokens), True, key=lambda count: found(count) is not None)
        self.num_dropped += num_tokens - count
        return first_tokens(turn, count), found(count)


def _arranged(nodes: Sequence[_Node]) -> list[_Node]:
    """Turns that were asked for one after another stay so; others follow their conversations, by their seeds."""
    found: list[_Node] = []
    first, nodes = 0, sorted(nodes, key=lambda node: node.number)
    for stop in range(1, len(nodes) + 1):
        if all(node.after >= stop for node in nodes[stop:]):
            found += _by_conversation(nodes[first:stop])
            first = stop
    return found


def _by_conversation(nodes: Sequence[_Node]) -> list[_Node]:
    """Each turn with those that go on from it right behind it."""
    own = {node.number for node in nodes}
    children: dict[int, list[_Node]] = {}
    for node in sorted(nodes, key=lambda node: node.seed, reverse=True):
        children.setdefault(node.parent if node.parent in own else -1, []).append(node)
    found: list[_Node] = []
    left = children.get(-1, [])
    while left:
        node = left.pop()
        found.append(node)
        left += children.get(node.number, [])
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
