"""Turns of conversations, sampled in this process: whoever is ready is in the next wave."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from prefrl.generation.base import Conversations, Home
from prefrl.types import Completion

# How long a wave waits for one more request, in seconds: conversations that become ready together share a wave.
_LINGER_SECONDS = 0.002
# How long a process without requests waits before it helps the others, which may need it for each forward pass.
_HELP_SECONDS = 0.02


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A request for the next turn of a conversation."""

    prompt: Sequence[int]
    max_tokens: int
    seed: int
    answer: Future[Completion] = field(default_factory=Future)


@dataclass(eq=False)
class LocalTurns:
    """A `prefrl.generation.base.TurnSampler` that generates in the thread that calls `serve`.

    Args:
        generate: One completion for each of the requests.
        sum_over_ranks: Adds up a number over all ranks, if each rank needs the others in every wave; otherwise None.
    """

    generate: Callable[[Sequence[TurnRequest]], Sequence[Completion]]
    sum_over_ranks: Callable[[int], int] | None = None
    # No SimpleQueue: if a process is held up for the timeout while it begins to wait, it waits forever (CPython 3.11).
    _events: queue.Queue[TurnRequest | None] = field(default_factory=queue.Queue)

    def ask(self, prompt: Sequence[int], *, max_tokens: int, seed: int, home: Home) -> Future[Completion]:
        """See `TurnSampler`."""
        request = TurnRequest(prompt, max_tokens, seed)
        self._events.put(request)
        return request.answer

    def notify(self) -> None:
        """See `TurnSampler`."""
        self._events.put(None)

    def serve(self, conversations: Conversations) -> None:
        """See `TurnSampler`. If ranks need each other, it returns when the conversations of all ranks are over."""
        if self.sum_over_ranks is not None:
            self._serve_together(conversations, self.sum_over_ranks)
            return
        while not conversations.has_news() and not conversations.is_over():
            conversations.attend()
            self._answer(self._next_wave(self._events.get()))

    def _serve_together(self, conversations: Conversations, sum_over_ranks: Callable[[int], int]) -> None:
        while sum_over_ranks(int(not conversations.is_over())):
            conversations.attend()
            wave = [] if conversations.is_over() else self._next_wave(self._wait(_HELP_SECONDS))
            if sum_over_ranks(len(wave)):
                self._answer(wave, always=True)

    def _wait(self, seconds: float) -> TurnRequest | None:
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _next_wave(self, first: TurnRequest | None) -> list[TurnRequest]:
        """The requests that have arrived or arrive within a moment of each other, in an order of their own."""
        wave = [first]
        try:
            while True:
                wave.append(self._events.get(timeout=_LINGER_SECONDS if any(wave) else 0))
        except queue.Empty:
            return sorted((request for request in wave if request is not None), key=lambda request: request.seed)

    def _answer(self, wave: Sequence[TurnRequest], *, always: bool = False) -> None:
        # A request may have been given up; that must not change what the others get.
        wave = [request for request in wave if request.answer.set_running_or_notify_cancel()]
        if not wave and not always:
            return
        for request, completion in zip(wave, self.generate(wave), strict=True):
            request.answer.set_result(completion)
