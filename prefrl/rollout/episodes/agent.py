"""An episode of an agent: a program that asks the policy over a chat API, and does what it likes with the answers."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from prefrl.data.formats import Message, read_messages
from prefrl.errors import EpisodeError, reason_of
from prefrl.rollout.episodes.environment import EMPTY_PROMPT, CallTimeout, Seat
from prefrl.rollout.episodes.play import EnvironmentFailure, EpisodeLimits, Played, Task, columns_of
from prefrl.rollout.gateway.server import Client, Gateway
from prefrl.rollout.gateway.session import Policy, Session
from prefrl.types import Episode, StopReason


class AgentPlayer:
    """Runs an agent once.

    Args:
        task: What the episode begins with.
        seat: Its kind has the agent; a function that is not async runs on its thread.
        limits: Options.
        gateway: Answers the agent's requests.
    """

    def __init__(self, task: Task, seat: Seat, limits: EpisodeLimits, gateway: Gateway) -> None:
        self._task = task
        self.seat = seat
        self._limits = limits
        self._gateway = gateway
        self.played = Played()

    async def play(self) -> Episode:
        """Run the agent to its end.

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
        )
        session = Session(policy, self._task.seed)
        await self._gateway.start()
        stop_reason: StopReason = "stop"
        result: Any = None
        try:
            with self._gateway.serving(session) as client:
                result = await self._called(client)
        except CallTimeout as error:
            stop_reason = "timeout"
            if not session.turns:
                raise EnvironmentFailure(f"{self._name}: {error}, and no answer") from error
        finally:
            self._take(session)
        if not session.turns:
            raise EnvironmentFailure(
                f"{self._name} ended without a request to the policy. Does it use client.base_url and client.api_key?"
            )
        reward, parts = self._reward(result)
        return Episode(
            self._name,
            stop_reason,
            self.played.turn_rewards,
            num_calls=session.num_calls,
            reward=reward,
            rewards=parts,
        )

    @property
    def _name(self) -> str:
        return self.seat.kind.name

    async def _called(self, client: Client) -> Any:
        agent = self.seat.kind.agent
        assert agent is not None
        row = copy.deepcopy(columns_of(self._task.row, self.seat.kind))
        try:
            return await self.seat.call(agent, row, client, timeout=self._limits.episode_timeout)
        except (CallTimeout, asyncio.CancelledError):
            raise
        except Exception as error:  # user code
            raise EnvironmentFailure(f"{self._name}: {reason_of(error)}") from error

    def _take(self, session: Session) -> None:
        """Note what was said. The rewards see the conversation of the last turn."""
        played = self.played
        played.turns = list(session.turns)
        played.turn_rewards = [0.0] * len(session.turns)
        row = self._task.row
        prompt: list[Message] = [] if row["prompt"] == EMPTY_PROMPT else list(read_messages(row, "prompt"))
        if session.turns:
            conversation = session.said[-1]
            first = next(i for i, message in enumerate(conversation) if message["role"] == "assistant")
            prompt, played.said = conversation[:first], conversation[first:]
        played.prompt = prompt

    def _reward(self, result: Any) -> tuple[float | None, dict[str, float]]:
        """The reward and its parts that have names; None if the result is for the reward functions."""
        if isinstance(result, Real):
            return self._number(result), {}
        if isinstance(result, Mapping) and result and all(isinstance(one, Real) for one in result.values()):
            parts = {str(name): self._number(one) for name, one in result.items()}
            return sum(parts.values()), parts
        self.played.result = result
        return None, {}

    def _number(self, value: Real) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise EpisodeError(f"{self._name} returned the reward {number}: must be finite")
        return number
