"""A gateway in a thread, and sessions of a policy whose answers are written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prefrl.data.chat import ChatTemplate
from prefrl.rewards.call import EventLoopThread
from prefrl.rollout.gateway.formats import Client
from prefrl.rollout.gateway.policy import Policy
from prefrl.rollout.gateway.server import Gateway, Limits
from prefrl.rollout.gateway.session import Session
from prefrl.types import Completion
from tests.unit.rollout.episodes.scripted import completion, hermes

T = TypeVar("T")


class Served:
    """A gateway that listens.

    Args:
        limits: Of its clients.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._loop = EventLoopThread()
        self.gateway = Gateway(limits=limits)
        self.run(self.gateway.start())

    def run(self, work: Any) -> Any:
        """The result of a coroutine, on the gateway's loop."""
        return self._loop.submit(work).result()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function, on the gateway's loop."""

        async def called() -> T:
            return function(*args)

        return self.run(called())  # type: ignore[no-any-return]

    @staticmethod
    def text_of(token_ids: Sequence[int]) -> str:
        return str(hermes().tokenizer.decode(list(token_ids)))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.abandon()

    def close(self) -> None:
        """Close the gateway; what waits on the loop goes on."""
        self.run(self.gateway.close())

    @property
    def num_connections(self) -> int:
        return self.gateway.num_connections

    @contextmanager
    def session(
        self, say: Callable[[int], Any], *, template: ChatTemplate | None = None, weights: Any = None, **policy: Any
    ) -> Iterator[tuple[Client, Session]]:
        """A session; `say(turn)` is what the policy says, or an exception, or a coroutine of them.

        Args:
            say: See above.
            template: Of the chat.
            weights: A `clients.Weights`, which gives log-probs; None: they are constant.
            policy: Options of `Policy`.
        """
        turns, template = iter(range(10**6)), template or hermes()

        async def sample(ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
            told = say(next(turns))
            if asyncio.iscoroutine(told):
                told = await told
            if isinstance(told, Exception):
                raise told
            made = completion(template, told, max_tokens)
            return made if weights is None else weights.said(ids, made)

        options = {"max_tokens": 5000, "context_limit": None, **policy}
        session = Session(Policy(template, sample, **options), lambda ids, number: number)
        serving = self.gateway.serving(session)
        client = self.call(serving.__enter__)
        try:
            yield client, session
        finally:
            self.call(serving.__exit__, None, None, None)
            self.run(session.close())
