"""Requested prompts, and the outcome of each."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prefrl.distributed import gather_objects
from prefrl.errors import GenerationError, PrefrlError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from prefrl.generation.vllm.requests import Prompt
    from prefrl.types import Completion

__all__ = ["MAX_RECOVERIES", "Asker", "Done", "Failed", "Lost", "Outcome", "VLLMPending", "raise_shared"]

MAX_RECOVERIES = 3


@dataclass(frozen=True, slots=True)
class Done:
    """A prompt's completions."""

    prompt: Prompt
    completions: list[Completion]


@dataclass(frozen=True, slots=True)
class Lost:
    """A prompt that is requested again once servers and weights are back."""

    prompt: Prompt
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt that cannot be completed: repeating the request would not help."""

    prompt: Prompt
    error: Exception


Outcome = Done | Lost | Failed


class Asker(Protocol):
    """Sends requests to servers, and waits for servers that are gone."""

    def submit(
        self, prompts: Sequence[Prompt], report: Callable[[Outcome], None], *, checks: bool = True
    ) -> Future[None]:
        """Request the completions of prompts.

        Args:
            prompts: The prompts.
            report: Gets one outcome for each prompt.
            checks: Whether to ask the servers for their weights first, so that none with others is asked at all.
        """
        ...

    @property
    def longest_silence(self) -> float:
        """The longest wait for the next outcome of a submitted prompt, in seconds."""
        ...

    def recover(self) -> None:
        """Wait for servers that are gone, and send them this run's weights. All processes must call it."""
        ...


class VLLMPending:
    """Completions that were requested from servers.

    Args:
        asker: Sends the requests.
        prompts: The prompts whose completions are requested.
    """

    def __init__(self, asker: Asker, prompts: Sequence[Prompt]) -> None:
        self._asker = asker
        self._submit(prompts)

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        self._asked = prompts
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._work = self._asker.submit(prompts, self._outcomes.put)

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        """The number and completions of each prompt, once for every prompt, as they become ready.

        Lost prompts are requested again when all others have arrived and the servers are back. The end is collective:
        all processes wait for each other there.

        Raises:
            GenerationError: A prompt failed on some process, or a server did not come back in time.
            WeightSyncError: A server came back, but did not load the weights.
        """
        for recovery in range(MAX_RECOVERIES + 1):
            lost: list[Lost] = []
            failure: Exception | None = None
            try:
                for outcome in self._arrivals():
                    if isinstance(outcome, Done):
                        yield outcome.prompt.number, outcome.completions
                    elif isinstance(outcome, Lost):
                        lost.append(outcome)
                    else:
                        failure = outcome.error
                        break
            finally:
                self.cancel()  # requests may still be running after a failure, or if the caller stopped reading
            raise_shared(failure)
            reasons = [reason for reasons in gather_objects([one.reason for one in lost]) for reason in reasons]
            if not reasons:
                return
            if recovery == MAX_RECOVERIES:
                raise GenerationError(
                    f"{len(reasons)} prompts were lost {recovery + 1} times, although the servers came back each "
                    f"time. One of the reasons: {reasons[0]}"
                )
            self._asker.recover()
            self._submit([one.prompt for one in lost])

    def cancel(self) -> None:
        """Cancel the running requests. All processes must call it, or none."""
        self._work.cancel()

    def _arrivals(self) -> Iterator[Outcome]:
        for _ in self._asked:
            try:
                yield self._outcomes.get(timeout=self._asker.longest_silence)
            except queue.Empty:
                limit = self._asker.longest_silence
                error = GenerationError(f"no request to a vLLM server ended within {limit:g} s, despite its deadline")
                yield Failed(self._asked[0], error)
                return


def raise_shared(error: Exception | None) -> None:
    """Raise, on all processes, the error of the first process that has one. All processes must call it."""
    shareable = error
    if error is not None and not isinstance(error, PrefrlError):
        shareable = GenerationError(f"{type(error).__name__}: {error}")
    first = next((its_error for its_error in gather_objects(shareable) if its_error is not None), None)
    if first is not None and first is error:
        raise error
    if first is not None:
        raise first from error
