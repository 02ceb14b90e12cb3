"""The conversations of one agent: each request continues what is known of them, to the token.

What a client sends is compared with the messages of earlier turns. The longest common beginning says which turn it
goes on from, and `next_context` which ids are sent. So edited histories, compaction, sub-agents and parallel requests
need no case of their own: each turn is the ids that were sent and those that were sampled, and turns with common
beginnings are one forest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefrl.data.chat import ChatTemplate, common_prefix_length, encode
from prefrl.data.formats import Message
from prefrl.data.next_turn import Answer, next_context, said_text
from prefrl.data.tool_calls import ToolCallReader, ToolParser, tool_call_reader
from prefrl.errors import ConfigError, DataError
from prefrl.options.types import ReasoningInHistory
from prefrl.rollout.gateway.formats import Asked, Ending, Reply, RequestError
from prefrl.rollout.turns import call_id, read_turn
from prefrl.types import Completion, Turn

logger = logging.getLogger(__name__)

OVERFLOW = "context_length_exceeded"


@dataclass(frozen=True)
class Policy:
    """What answers the requests of sessions.

    Args:
        template: The model's chat template; requests bring their own tools.
        sample: Samples a completion of at most so many tokens: ids, tokens, seed.
        max_tokens: Of a conversation beyond its first request.
        context_limit: Tokens of a request and its answer; None: no limit.
        max_turns: Of a session; None: no limit.
        reasoning: What later turns see of the thinking in earlier ones.
        sampling: Options of the sampler by their names in requests, for warnings.
        tool_parser: See `tool_call_reader`.
    """

    template: ChatTemplate
    sample: Callable[[Sequence[int], int, int], Awaitable[Completion]]
    max_tokens: int
    context_limit: int | None
    max_turns: int | None = None
    reasoning: ReasoningInHistory = "template"
    sampling: dict[str, Any] | None = None
    tool_parser: ToolParser | None = None


@dataclass(frozen=True)
class _Node:
    """A turn, and the conversation that it stands in."""

    seen: list[Message]  # what it saw, and its answer
    answers: list[Answer]  # of the conversation, in order; the last one is its own
    start: int  # tokens of the conversation's first request
    tools: str  # of the request


class Session:
    """What one agent asks, from its beginning to its end. It is only used on one event loop.

    Args:
        policy: Answers.
        seed: Gives the seed of a turn, from the ids that are sent and how often they were sent before.
    """

    def __init__(self, policy: Policy, seed: Callable[[Sequence[int], int], int]) -> None:
        self._policy = policy
        self._seed = seed
        self.turns: list[Turn] = []  # in the order in which they ended
        self.said: list[list[Message]] = []  # the conversation of each turn, with its answer
        self.num_calls = 0
        self.is_over = False
        self._nodes: list[_Node] = []
        self._sent: list[list[int]] = []  # the ids of every request
        self._replies: dict[str, asyncio.Future[Reply]] = {}  # by request
        self._readers: dict[str, ToolCallReader] = {}  # by tools

    async def answer(self, asked: Asked, *, is_retry: bool = False) -> Reply:
        """The answer to a request; that of the same request before, if the client only asks again.

        Raises:
            RequestError: It cannot be answered.
        """
        key = _digest([asked.messages, asked.tools, asked.max_tokens, asked.stop])
        known = self._replies.get(key)
        if is_retry and known is not None and not (known.done() and (known.cancelled() or known.exception())):
            return await asyncio.shield(known)
        work = self._replies[key] = asyncio.ensure_future(self._answer(asked))
        # A client that hangs up does not undo what is sampled: it may ask again.
        return await asyncio.shield(work)

    async def _answer(self, asked: Asked) -> Reply:
        policy = self._policy
        if self.is_over:
            raise RequestError("the episode of this key is over", status=410)
        if policy.max_turns is not None and len(self._sent) >= policy.max_turns:
            raise RequestError(f"this episode may have at most {policy.max_turns} turns (max_turns)", status=429)
        if not asked.messages or asked.messages[-1]["role"] == "assistant":
            raise RequestError("messages: the last one must not be of the assistant, or there is nothing to answer")
        tools = json.dumps(asked.tools, sort_keys=True)
        template = replace(policy.template, tools=asked.tools or None)
        try:
            reader = self._reader(template, asked, tools)
            node = self._continued(asked.messages, tools)
            token_ids = self._context(template, asked.messages, node)
        except (ConfigError, DataError) as error:
            raise RequestError(str(error)) from error
        start = len(token_ids) if node is None else node.start
        number = sum(ids == token_ids for ids in self._sent)
        self._sent.append(token_ids)
        completion = await policy.sample(token_ids, self._room(start, token_ids, asked), self._seed(token_ids, number))
        return self._note(template, reader, asked, Turn(token_ids, completion), node, start, tools)

    def _reader(self, template: ChatTemplate, asked: Asked, tools: str) -> ToolCallReader | None:
        if not asked.tools:
            return None
        if tools not in self._readers:
            schemas = {tool["function"]["name"]: tool for tool in asked.tools}
            self._readers[tools] = tool_call_reader(template, schemas, tool_parser=self._policy.tool_parser)
        return self._readers[tools]

    def _continued(self, messages: list[Message], tools: str) -> _Node | None:
        """The turn that a request goes on from; None: it begins a conversation."""
        lengths = [common_prefix_length(messages, node.seen) if node.tools == tools else 0 for node in self._nodes]
        longest = max(lengths, default=0)
        if not longest:
            return None
        node = self._nodes[len(lengths) - 1 - lengths[::-1].index(longest)]
        return node if any(answer.message in messages for answer in node.answers) else None

    def _context(self, template: ChatTemplate, messages: list[Message], node: _Node | None) -> list[int]:
        if node is None:
            text = template.render(messages, add_generation_prompt=True)
            return encode(text, [], template.tokenizer).token_ids
        policy = self._policy
        context = next_context(template, messages, seen=node.seen, answers=node.answers, reasoning=policy.reasoning)
        return context.token_ids

    def _room(self, start: int, token_ids: list[int], asked: Asked) -> int:
        """How many tokens may be sampled.

        Raises:
            RequestError: None.
        """
        length, limit = len(token_ids), self._policy.context_limit
        room = start + self._policy.max_tokens - length
        if limit is not None:
            room = min(room, limit - length)
        if room < 1:
            longest = length + room
            raise RequestError(
                f"This model's maximum context length is {longest} tokens. However, your messages resulted in "
                f"{length} tokens. Please reduce the length of the messages.",
                code=OVERFLOW,
            )
        return room if asked.max_tokens is None else min(room, asked.max_tokens)

    def _note(
        self,
        template: ChatTemplate,
        reader: ToolCallReader | None,
        asked: Asked,
        turn: Turn,
        node: _Node | None,
        start: int,
        tools: str,
    ) -> Reply:
        number = len(self.turns)
        self.turns.append(turn)
        parsed, message = read_turn(template, reader, turn, lambda call: call_id(number + 1, call))
        self.num_calls += len(parsed.calls)
        text = said_text(template, turn)
        stop = min((one for one in asked.stop if one in text), key=text.index, default=None)
        if stop is not None:  # the sampled ids stay whole
            message = {"role": "assistant", "content": text[: text.index(stop)]}
        answers = [*([] if node is None else node.answers), Answer(message, turn)]
        self._nodes.append(_Node([*asked.messages, message], answers, start, tools))
        self.said.append(self._nodes[-1].seen)
        ending: Ending = "stop" if stop is None else "stop_string"
        if turn.completion.finish_reason == "length" and stop is None:
            ending = "length"
        ids = len(turn.sent_ids), len(turn.completion.token_ids)
        return Reply(f"{number:08x}", message, ending, stop, *ids, created=int(time.time()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
