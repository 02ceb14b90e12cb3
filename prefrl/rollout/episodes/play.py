"""One episode: the model's turns, its tool calls, and what the environment answers."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefrl.data.chat import ChatTemplate, encode
from prefrl.data.encode import TruncationSide, kept
from prefrl.data.formats import Message, read_messages
from prefrl.data.next_turn import Answer, next_context
from prefrl.data.tool_calls import ParsedTurn, ToolCall, ToolCallReader, ToolParser
from prefrl.errors import DataError, EpisodeError, reason_of
from prefrl.generation.base import SamplingParams
from prefrl.options.types import EnvironmentErrorMode, ReasoningInHistory, ToolErrorMode
from prefrl.rollout.episodes.environment import EMPTY_PROMPT, CallTimeout, EnvironmentKind, Observation, Seat
from prefrl.rollout.turns import call_id, read_turn, with_new_routes
from prefrl.types import Completion, Episode, StopReason, Turn


@dataclass(frozen=True)
class EpisodeLimits:
    """What each episode may take, and what follows a failure."""

    max_prompt_length: int | None  # tokens
    truncation: TruncationSide  # of longer prompts
    max_tokens: int  # of a context beyond the prompt: what was sampled, and what tools and the environment said
    max_characters: int  # a longer answer of a tool or the environment cannot fit into `max_tokens`
    max_turns: int | None
    max_tool_calling_iterations: int | None
    tool_timeout: float  # seconds of a call of a tool or a method of the environment
    episode_timeout: float | None  # seconds
    tool_error: ToolErrorMode
    environment_error: EnvironmentErrorMode
    reasoning_in_history: ReasoningInHistory
    max_concurrent_environments: int | None
    tool_parser: ToolParser | None = None  # of agents, whose requests bring their own tools


class EnvironmentFailure(Exception):
    """The environment failed, so that the episode says nothing about the model."""


@dataclass(frozen=True)
class Task:
    """What an episode begins with."""

    row: Mapping[str, Any]  # of the dataset, with `prompt` and `prompt_ids`
    template: ChatTemplate  # with the schemas of the tools
    reader: ToolCallReader | None  # None: there are no tools
    # The seed of a turn: the ids that are sent, and how often they were sent before.
    seed: Callable[[Sequence[int], int], int]
    environment_seed: int
    # Samples a completion of at most so many tokens: ids, tokens, seed.
    sample: Callable[[Sequence[int], int, int], Awaitable[Completion]]
    context_limit: int | None  # tokens of a prompt and its completion; None: no limit
    sampling: SamplingParams | None = None  # how turns are sampled, of which agents are told


@dataclass
class Played:
    """An episode, while it goes on and at its end."""

    turns: list[Turn] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)  # one for each turn
    said: list[Message] = field(default_factory=list)  # all messages after the prompt
    num_calls: int = 0
    num_failed_calls: int = 0
    prompt: list[Message] = field(default_factory=list)  # with what `reset` added
    num_dropped: int = 0  # tokens that were sampled, but stand in no turn


class Player:
    """Plays one episode.

    Args:
        task: What it begins with.
        seat: Where it is played.
        limits: Options.
    """

    def __init__(self, task: Task, seat: Seat, limits: EpisodeLimits) -> None:
        self._task = task
        self.seat = seat
        self._limits = limits
        self._kind: EnvironmentKind = seat.kind
        self.played = Played()
        self._answers: list[Answer] = []
        self._seen: list[Message] = []  # what the last turn saw, and its answer
        self._num_iterations = 0  # turns whose calls were run

    async def play(self) -> Episode:
        """Play the episode to its end.

        Raises:
            EnvironmentFailure: The environment raised or hung.
            EpisodeError: A tool failed, and the options say that this ends the run.
            DataError: The chat template cannot continue the conversation, or the prompt is too long.
        """
        try:
            async with asyncio.timeout(self._limits.episode_timeout) as limit:
                stop_reason = await self._turns()
        except TimeoutError as error:
            if not limit.expired():
                raise
            if not self._answers:
                raise EnvironmentFailure(f"no turn within episode_timeout={self._limits.episode_timeout} s") from error
            stop_reason = "timeout"
        reward, parts = await self._reward()
        played = self.played
        return Episode(
            self._kind.name,
            stop_reason,
            played.turn_rewards,
            num_calls=played.num_calls,
            num_failed_calls=played.num_failed_calls,
            reward=reward,
            rewards=parts,
            environment=self.seat.environment,
        )

    async def _turns(self) -> StopReason:
        token_ids = await self._begin()
        start = len(token_ids)
        if self._room(start, start)[0] < 1:
            raise DataError(
                f"a prompt has {start} tokens, but a prompt and its completion may have at most "
                f"{self._task.context_limit} together. Shorten the prompts (max_prompt_length)"
            )
        while True:
            room, at_limit = self._room(start, len(token_ids))
            if room < 1:
                return at_limit
            seed = self._task.seed(token_ids, sum(turn.sent_ids == token_ids for turn in self.played.turns))
            completion = await self._task.sample(token_ids, room, seed)
            parsed = self._note(Turn(token_ids, completion))
            if completion.finish_reason == "length":
                return at_limit
            replies, stop_reason = await self._answer(parsed)
            if stop_reason is not None:
                return stop_reason
            token_ids = await self._continue(replies)

    async def _begin(self) -> list[int]:
        """Begin the episode; returns the ids of the prompt."""
        row = self._task.row
        messages = list(read_messages(row, "prompt", allow_empty=True))
        opening = None
        if self._kind.make is not None:
            await self._guarded("set-up", self.seat.set_up(self._limits.tool_timeout))
            if self._kind.is_full:
                self.seat.environment.seed = self._task.environment_seed
            # The environment may change what it is given; the row is that of other episodes, too.
            opening = await self._of_environment("reset", **copy.deepcopy(columns_of(row, self._kind)))
        self.played.prompt = self._seen = _opened(messages, opening, self._kind.name)
        if opening is None:
            return list(row["prompt_ids"])
        text = self._task.template.render(self._seen, add_generation_prompt=True)
        token_ids = encode(text, [], self._task.template.tokenizer).token_ids
        try:
            return token_ids[kept(len(token_ids), self._limits.max_prompt_length, self._limits.truncation)]
        except DataError as error:
            raise DataError(f"the prompt with what {self._kind.name}.reset returned {error}") from error

    def _room(self, start: int, length: int) -> tuple[int, StopReason]:
        """How many tokens may be sampled behind `length` ids, and what it means that they are used up."""
        left = start + self._limits.max_tokens - length
        in_context = left if self._task.context_limit is None else self._task.context_limit - length
        return (in_context, "context") if in_context < left else (left, "max_tokens")

    def _note(self, turn: Turn) -> ParsedTurn:
        """Read what the model said in a turn, and keep it."""
        turn = with_new_routes(turn, self.played.turns[-1] if self.played.turns else None)
        self.played.turns.append(turn)
        number = len(self.played.turns)
        parsed, message = read_turn(self._task.template, self._task.reader, turn, lambda call: call_id(number, call))
        self.played.turn_rewards.append(0.0)
        self.played.said.append(message)
        self._seen = [*self._seen, message]
        self._answers.append(Answer(message, turn))
        return parsed

    async def _answer(self, parsed: ParsedTurn) -> tuple[list[Message], StopReason | None]:
        """The messages that follow a turn, or why there are none."""
        if not parsed.calls:
            return await self._response()
        limit = self._limits.max_tool_calling_iterations
        if self._is_last_turn() or (limit is not None and self._num_iterations >= limit):
            return [], "parse_error" if any(call.problem for call in parsed.calls) else "max_turns"
        self._num_iterations += 1
        replies: list[Message] = []
        for number, call in enumerate(parsed.calls):
            observation = await self._result(call)
            # A list stays one for the rewards; the model sees its text.
            content: Any = "" if observation.content is None else observation.content
            message = {"role": "tool", "name": call.name, "content": content}
            if call.name:
                message["tool_call_id"] = self._call_id_of_last(number)
            replies.append(message)
            self.played.turn_rewards[-1] += observation.reward
            if observation.done:
                self.played.said += replies
                return [], "tool_done"
        return replies, None

    def _call_id_of_last(self, number: int) -> str:
        calls = self.played.said[-1].get("tool_calls") or ()
        return str(calls[number]["id"]) if number < len(calls) else ""

    def _is_last_turn(self) -> bool:
        return self._limits.max_turns is not None and len(self.played.turns) >= self._limits.max_turns

    async def _response(self) -> tuple[list[Message], StopReason | None]:
        """The environment's answer to a turn without a call."""
        if not self._kind.is_full:
            return [], "stop"
        observation = await self._of_environment("respond", dict(self.played.said[-1]))
        if observation is None:
            return [], "stop"
        name = f"{self._kind.name}.respond"
        if not isinstance(observation, str | list | Observation):
            raise EpisodeError(f"{name} returned {observation!r}: must be a text, an Observation or None")
        observation = _observation(observation, name)
        self.played.turn_rewards[-1] += observation.reward
        reply: list[Message] = []
        if observation.content is not None:
            reply = [{"role": "user", "content": observation.content}]
        if observation.done or not reply:
            self.played.said += reply
            return [], "tool_done" if observation.done else "stop"
        if self._is_last_turn():
            self.played.said += reply
            return [], "max_turns"
        return reply, None

    async def _result(self, call: ToolCall) -> Observation:
        """What the model is told of a call."""
        self.played.num_calls += 1
        problem = call.problem
        failure: Exception | None = None
        if problem is None:
            where = self.seat.environment if call.name in self._kind.methods else None
            tool = getattr(where, call.name) if where is not None else self._kind.tools[call.name]
            try:
                result = await self.seat.call(tool, timeout=self._limits.tool_timeout, **call.arguments)
            except CallTimeout as error:
                problem, failure = f"No result within {self._limits.tool_timeout:g} seconds", error
            except Exception as error:
                problem, failure = reason_of(error), error
            else:
                return _observation(result, f"tool {call.name}")
        self.played.num_failed_calls += 1
        if failure is not None and self._limits.tool_error == "raise":
            raise EpisodeError(
                f"tool {call.name!r} with arguments {dict(call.arguments)}: {problem}. Fix the tool, or set "
                "tool_error='tell' to tell the model about it"
            ) from failure
        return Observation(json.dumps({"error": problem}, ensure_ascii=False))

    async def _continue(self, replies: list[Message]) -> list[int]:
        """The ids of the next turn, which sees these messages, too."""
        shown = [
            self._accepted(self._shortened({**reply, "content": _text(reply["content"], "tool")})) for reply in replies
        ]
        visible = [*self._seen, *shown]
        if self._kind.edits:
            visible = _edited(await self._of_environment("edit", copy.deepcopy(visible)), f"{self._kind.name}.edit")
        context = next_context(
            self._task.template,
            visible,
            seen=self._seen,
            answers=self._answers,
            reasoning=self._limits.reasoning_in_history,
        )
        is_list = [isinstance(reply["content"], list) for reply in replies]
        self.played.said += [reply if raw else text for reply, text, raw in zip(replies, shown, is_list, strict=True)]
        self._seen = visible
        return context.token_ids

    def _accepted(self, reply: Message) -> Message:
        """The message; of role "user" if it tells of a call that could not be read, and the template refuses that."""
        if reply["role"] != "tool" or reply.get("tool_call_id"):
            return reply
        text = self._task.template.try_render([*self._seen, reply], add_generation_prompt=True)
        is_shown = text is not None and reply["content"] in text
        return reply if is_shown else {"role": "user", "content": reply["content"]}

    def _shortened(self, reply: Message) -> Message:
        """The message, cut off where it cannot fit into the episode's tokens, so that it need not be tokenized."""
        longest = self._limits.max_characters
        content = reply["content"]
        return reply if len(content) <= longest else {**reply, "content": content[:longest]}

    async def _reward(self) -> tuple[float | None, dict[str, float]]:
        """The environment's reward with those of the turns, and its parts that have names."""
        if not self._kind.has_reward:
            return None, {}
        value = await self._of_environment("get_reward")
        of_turns = sum(self.played.turn_rewards)
        has_turn_rewards = any(self.played.turn_rewards)
        if value is None:
            return (of_turns if has_turn_rewards else None), {}
        name = f"{self._kind.name}.get_reward"
        if isinstance(value, Mapping):
            parts = {str(key): _number(part, name) for key, part in value.items()}
            return sum(parts.values()) + of_turns, parts
        return _number(value, name) + of_turns, {}

    async def _of_environment(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self.seat.call(
            getattr(self.seat.environment, method), *args, timeout=self._limits.tool_timeout, **kwargs
        )
        return await self._guarded(method, call)

    async def _guarded(self, method: str, call: Awaitable[Any]) -> Any:
        name = f"{self._kind.name}.{method}"
        try:
            return await call
        except CallTimeout as error:
            raise EnvironmentFailure(
                f"{name}: no result within tool_timeout={self._limits.tool_timeout:g} s"
            ) from error
        except EpisodeError:
            raise
        except Exception as error:
            raise EnvironmentFailure(f"{name}: {reason_of(error)}") from error


def columns_of(row: Mapping[str, Any], kind: EnvironmentKind) -> dict[str, Any]:
    """What an environment or an agent is given of a row of the dataset."""
    hidden = {"prompt_ids"}
    if kind.is_one_of_several:
        hidden.add("environment")
    if row["prompt"] == EMPTY_PROMPT:
        hidden.add("prompt")
    return {name: value for name, value in row.items() if name not in hidden}


def _opened(messages: list[Message], opening: Any, name: str) -> list[Message]:
    """The prompt with what `reset` returned: text at the end of the last message, or messages after it."""
    if opening is None:
        return messages
    if isinstance(opening, list) and all(isinstance(one, Mapping) for one in opening):
        if all("role" in message for message in opening):
            return [*messages, *opening]
        if all("type" in part for part in opening):
            opening = _text(opening, f"{name}.reset")
    if not isinstance(opening, str):
        raise EpisodeError(f"{name}.reset returned {opening!r}: must be None, a text, or a list of messages")
    last = messages[-1]
    content = last["content"]
    added = f"{content}{opening}" if isinstance(content, str) else [*content, {"type": "text", "text": opening}]
    return [*messages[:-1], {**last, "content": added}]


def _observation(value: Any, what: str) -> Observation:
    """What a tool or `respond` returned; a list of parts of a content stays one.

    Raises:
        EpisodeError: It cannot be shown to the model, or its reward is not a number.
    """
    observation = value if isinstance(value, Observation) else Observation(value)
    content: Any = observation.content
    if content is None and isinstance(value, Observation):
        return Observation(None, _number(value.reward, what), bool(value.done))
    text = _text(content, what)
    is_kept = isinstance(content, list)
    return Observation(content if is_kept else text, _number(observation.reward, what), bool(observation.done))


def _edited(value: Any, what: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and "role" in m for m in value):
        raise EpisodeError(f"{what} returned {value!r:.200}: must be the list of messages that the next turn sees")
    return value


def _text(value: Any, what: str) -> str:
    """A result as the model sees it. Parts of a content are joined.

    Raises:
        EpisodeError: A part is not text.
    """
    if not isinstance(value, list) or not value or not all(isinstance(p, Mapping) and "type" in p for p in value):
        return value if isinstance(value, str) else str(value)
    other = [part["type"] for part in value if part["type"] != "text"]
    if other:
        raise EpisodeError(f"{what} returned a part of type {other[0]!r}: only text can be shown to the model")
    return "".join(str(part["text"]) for part in value)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)  # also of a tensor or an array
    except Exception as error:
        raise EpisodeError(f"{what} returned the reward {value!r}: must be a number") from error
    if not math.isfinite(number):
        raise EpisodeError(f"{what} returned the reward {number}: must be finite")
    return number
