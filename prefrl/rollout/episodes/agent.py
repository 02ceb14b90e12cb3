"""An episode of an agent: a program that asks the policy over a chat API, and does what it likes with the answers."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefrl.data.formats import Message, read_messages
from prefrl.errors import EpisodeError, reason_of
from prefrl.rollout.episodes.environment import EMPTY_PROMPT, CallTimeout, Seat
from prefrl.rollout.episodes.play import EnvironmentFailure, EpisodeLimits, Played, Task, columns_of
from prefrl.rollout.gateway.policy import Policy, Shared
from prefrl.rollout.gateway.server import Gateway
from prefrl.rollout.gateway.session import Session
from prefrl.types import Episode, StopReason


@dataclass
class Agents:
    """What the agents of a run share."""

    gateway: Gateway = field(default_factory=Gateway)
    shared: Shared = field(default_factory=Shared)


@dataclass(frozen=True)
class _Ended:
    """How a run of an agent ended."""

    stop_reason: StopReason
    result: Any = None
    has_returned: bool = True


class AgentPlayer:
    """Runs an agent once.

    Args:
        task: What the episode begins with.
        seat: Its kind has the agent; a function that is not async runs on its thread.
        limits: Options.
        agents: Answers the agent's requests.
    """

    def __init__(self, task: Task, seat: Seat, limits: EpisodeLimits, agents: Agents) -> None:
        self._task = task
        self.seat = seat
        self._limits = limits
        self._agents = agents
        self.session: Session | None = None  # once it is played
        self.played = Played()

    async def play(self) -> Episode:
        """Run the agent to its end.

        An agent that does not come to its end, because time, turns or tokens are used up, has the reward 0, besides
        what it was credited with.

        Raises:
            EnvironmentFailure: It raised an error, made no request, or hung before its first answer.
            EpisodeError: Its reward is not a number.
        """
        policy = Policy(
            self._task.template,
            self._task.sample,
            max_tokens=self._limits.max_tokens,
            context_limit=self._task.context_limit,
            max_turns=self._limits.max_turns,
            reasoning=self._limits.reasoning_in_history,
            sampling=self._task.sampling,
            tool_parser=self._limits.tool_parser,
            shared=self._agents.shared,
        )
        session = self.session = Session(policy, self._task.seed)
        await self._agents.gateway.start()
        try:
            ended = await self._run(session)
        finally:
            await session.close()
            self._take(session)
        if session.failure is not None:
            raise session.failure
        if not session.turns:
            raise EnvironmentFailure(
                f"{self._name} ended without a request to the policy. Does it use client.base_url and client.api_key?"
            )
        reward, parts = self._reward(ended)
        return Episode(
            self._name,
            ended.stop_reason,
            self.played.turn_rewards,
            num_calls=session.num_calls,
            num_failed_calls=session.num_failed_calls,
            reward=reward,
            rewards=parts,
            result=ended.result,
            said=session.said,
            parents=session.parents,
        )

    @property
    def _name(self) -> str:
        return self.seat.kind.name

    async def _run(self, session: Session) -> _Ended:
        agent = self.seat.kind.agent
        assert agent is not None
        row = copy.deepcopy(columns_of(self._task.row, self.seat.kind))
        with self._agents.gateway.serving(session) as client:
            try:
                result = await self.seat.call(agent, row, client, timeout=self._limits.episode_timeout)
            except CallTimeout as error:
                if session.turns:
                    return _Ended("timeout", has_returned=False)
                raise EnvironmentFailure(f"{self._name}: {error}, and no answer") from error
            except asyncio.CancelledError:
                raise
            except EpisodeError:
                raise
            except Exception as error:  # user code
                if session.failure is not None:
                    raise session.failure from error
                if session.refusal is None or not session.turns:
                    raise EnvironmentFailure(f"{self._name}: {reason_of(error)}") from error
                return _Ended(session.refusal[0], has_returned=False)
        return _Ended("stop" if session.refusal is None else session.refusal[0], result)

    def _take(self, session: Session) -> None:
        """Note what was said. The rewards see the conversation of the last turn."""
        played = self.played
        played.turns = session.turns
        played.turn_rewards = session.turn_rewards
        played.num_dropped = session.num_dropped
        row = self._task.row
        prompt: list[Message] = [] if row["prompt"] == EMPTY_PROMPT else list(read_messages(row, "prompt"))
        if session.turns:
            conversation = session.conversations[-1]
            first = next(i for i, message in enumerate(conversation) if message["role"] == "assistant")
            prompt, played.said = conversation[:first], conversation[first:]
        played.prompt = prompt

    def _reward(self, ended: _Ended) -> tuple[float | None, dict[str, float]]:
        """The reward with those of the turns, and its parts that have names; None if the result is for the rewards."""
        of_turns, result = sum(self.played.turn_rewards), ended.result
        if not ended.has_returned:
            return of_turns, {}
        if isinstance(result, Mapping) and result and all(map(_is_number, result.values())):
            parts = {str(name): self._number(one) for name, one in result.items()}
            return sum(parts.values()) + of_turns, parts
        if _is_number(result):
            return self._number(result) + of_turns, {}
        return (of_turns if any(self.played.turn_rewards) else None), {}

    def _number(self, value: Any) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise EpisodeError(f"{self._name} returned the reward {number}: must be finite")
        return number


def _is_number(value: Any) -> bool:
    """Whether a value is one number: of Python, NumPy or PyTorch."""
    return hasattr(type(value), "__float__") and getattr(value, "ndim", 0) == 0
