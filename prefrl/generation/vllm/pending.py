"""Requested prompts and turns of conversations, and the outcome of each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Generic

from prefrl.distributed import gather_objects, without_teams
from prefrl.errors import GenerationError, PrefrlError
from prefrl.generation.base import Conversations, Home, SamplingParams
from prefrl.generation.vllm.asking import Asker, Done, Failed, Lost, Outcome, Q, R
from prefrl.generation.vllm.requests import PromptRequest
from prefrl.types import Completion

MAX_RECOVERIES = 3


class VLLMPending(Generic[Q, R]):
    """What was requested from servers, such as completions.

    Args:
        asker: Sends the requests.
        requests: What is asked for.
    """

    def __init__(self, asker: Asker[Q, R], requests: Sequence[Q]) -> None:
        self._asker = asker
        self._work: list[Future[None]] = []
        self._submit(requests)
        # Of those who ask what has `arrived`.
        self._num_running = len(requests)
        self._lost: list[Lost[Q]] = []
        self._num_repeated = 0  # since the last result

    def _submit(self, requests: Sequence[Q]) -> None:
        self._asked = requests
        # A SimpleQueue can miss a timeout, see `LocalTurns`.
        self._outcomes: queue.Queue[Outcome[Q, R]] = queue.Queue()
        self._work = [self._asker.submit(requests, self._outcomes.put)]

    def as_completed(self) -> Iterator[tuple[int, R]]:
        """The number and result of each request, once for every request, as they become ready.

        Lost requests are repeated when all others have arrived and the servers are back. The end is collective: all
        processes wait for each other there.

        Raises:
            GenerationError: A request failed on some process, or a server did not come back in time.
            WeightSyncError: A server came back, but did not load the weights.
        """
        for recovery in range(MAX_RECOVERIES + 1):
            lost: list[Lost[Q]] = []
            failure: Exception | None = None
            try:
                for outcome in self._arrivals():
                    if isinstance(outcome, Done):
                        yield outcome.request.number, outcome.result
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
            self._check_recoveries(recovery, reasons)
            self._asker.recover()
            self._submit([one.request for one in lost])

    def cancel(self) -> None:
        """Cancel the running requests. All processes must call it, or none."""
        for work in self._work:
            work.cancel()

    @property
    def longest_silence(self) -> float:
        """See `prefrl.generation.base.Polled`."""
        return self._asker.longest_silence

    @property
    def is_stuck(self) -> bool:
        """See `prefrl.generation.base.Polled`."""
        return bool(self._lost) and self._num_running == 0

    def arrived(self) -> Iterator[tuple[int, R]]:
        """See `prefrl.generation.base.Polled`."""
        while not self._outcomes.empty():  # nobody else takes any
            outcome = self._outcomes.get()
            self._num_running -= 1
            if isinstance(outcome, Done):
                self._num_repeated = 0
                yield outcome.request.number, outcome.result
            elif isinstance(outcome, Lost):
                self._lost.append(outcome)
            else:
                raise outcome.error

    def repeat_lost(self) -> None:
        """See `prefrl.generation.base.Polled`."""
        if not self._lost:
            return
        lost, self._lost = self._lost, []
        self._check_recoveries(self._num_repeated, [one.reason for one in lost])
        self._num_repeated += 1
        self._num_running += len(lost)
        self._work.append(self._asker.submit([one.request for one in lost], self._outcomes.put))

    def _check_recoveries(self, count: int, reasons: Sequence[str]) -> None:
        if count == MAX_RECOVERIES:
            raise GenerationError(
                f"{len(reasons)} {self._asker.item}s were lost {count + 1} times, although the servers came back each "
                f"time. One of the reasons: {reasons[0]}"
            )

    def _arrivals(self) -> Iterator[Outcome[Q, R]]:
        for _ in self._asked:
            try:
                yield self._outcomes.get(timeout=self._asker.longest_silence)
            except queue.Empty:
                limit = self._asker.longest_silence
                error = GenerationError(f"no request to a vLLM server ended within {limit:g} s, despite its deadline")
                yield Failed(self._asked[0], error)
                return


def error_of(task: Callable[[], None]) -> Exception | None:
    """The exception that a task raises, or None."""
    try:
        task()
    except Exception as error:
        return error
    return None


def raise_shared(error: Exception | None) -> None:
    """Raise, on all processes, the error of the first process that has one. All processes must call it."""
    shareable = error
    if error is not None and not isinstance(error, PrefrlError):
        shareable = GenerationError(f"{type(error).__name__}: {error}")
    with without_teams():
        errors = gather_objects(shareable)
    first = next((its_error for its_error in errors if its_error is not None), None)
    if first is not None and first is error:
        raise error
    if first is not None:
        raise first from error


class VLLMTurns:
    """A `prefrl.generation.base.PolledTurns` whose requests run on the request thread of the servers' client.

    Requests that are lost with a server are sent again once no conversation can go on without them and the servers are
    back. Their seeds stay, so the same completions come back.

    Args:
        asker: Sends the requests.
        sampling: How all completions are sampled, but for their number and length.
        step: Returns the optimizer step of the servers' weights.
    """

    def __init__(
        self, asker: Asker[PromptRequest, list[Completion]], sampling: SamplingParams, *, step: Callable[[], int]
    ) -> None:
        self._asker = asker
        self._sampling = replace(sampling, num_samples=1)
        self._step = step
        self._lock = threading.Lock()  # for all that follows
        self._answers: dict[int, Future[Completion]] = {}  # by number of the request
        self._lost: list[Lost[PromptRequest]] = []
        self._num_asked = 0
        self._failure: Exception | None = None
        self._num_done = 0
        # Of all processes, or of this one if it repeats by itself.
        self._num_recoveries = 0  # since the last turn
        self._num_done_before = 0  # before the last recovery
        self._event = threading.Event()

    def ask(self, prompt: Sequence[int], *, max_tokens: int, seed: int, home: Home) -> Future[Completion]:
        """See `TurnSampler`."""
        answer: Future[Completion] = Future()
        with self._lock:
            number = self._num_asked
            self._num_asked += 1
            self._answers[number] = answer
        sampling = replace(self._sampling, max_tokens=max_tokens)
        work = self._asker.submit(
            [PromptRequest(number, prompt, seed, sampling, self._step(), home)], self._note, checks=number == 0
        )
        answer.add_done_callback(lambda answer: self._forget(number, work) if answer.cancelled() else None)
        return answer

    def notify(self) -> None:
        """See `TurnSampler`."""
        self._event.set()

    def serve(self, conversations: Conversations) -> None:
        """See `TurnSampler`."""
        while not conversations.has_news():
            self._event.clear()
            conversations.attend()
            if conversations.has_news():
                return
            is_stuck = self.is_stuck(conversations, min_lost=1)
            if self._failure is None and not conversations.is_over() and not is_stuck:
                self._event.wait()
                continue
            raise_shared(self._failure)
            lost = self._take_lost()
            of_ranks = gather_objects(([one.reason for one in lost], self._num_done))
            reasons = [reason for reasons, _ in of_ranks for reason in reasons]
            if not reasons:
                return
            self._count_recovery(reasons, sum(num_done for _, num_done in of_ranks))
            self._asker.recover()
            self._asker.submit([one.request for one in lost], self._note)

    def _count_recovery(self, reasons: Sequence[str], num_done: int) -> None:
        """Raise if the servers came back several times without a single turn, on all processes alike."""
        if num_done > self._num_done_before:
            self._num_recoveries, self._num_done_before = 0, num_done
        if self._num_recoveries == MAX_RECOVERIES:
            raise GenerationError(
                f"{len(reasons)} turns were lost {MAX_RECOVERIES + 1} times, although the servers came back each "
                f"time. One of the reasons: {reasons[0]}"
            )
        self._num_recoveries += 1

    @property
    def failure(self) -> Exception | None:
        """See `PolledTurns`."""
        return self._failure

    def is_stuck(self, conversations: Conversations, *, min_lost: int = 0) -> bool:
        """See `PolledTurns`; with `min_lost=1`, servers must be back before one can go on."""
        with self._lock:
            return min_lost <= len(self._lost) == len(self._answers) and conversations.is_waiting()

    def repeat_lost(self) -> None:
        """See `Polled`."""
        if lost := self._take_lost():
            self._count_recovery([one.reason for one in lost], self._num_done)
            self._asker.submit([one.request for one in lost], self._note)

    def _take_lost(self) -> list[Lost[PromptRequest]]:
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def _note(self, outcome: Outcome[PromptRequest, list[Completion]]) -> None:
        """Called on the request thread."""
        number = outcome.request.number
        if isinstance(outcome, Done):
            answer = self._answers.get(number)
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(outcome.result[0])
            with self._lock:  # not before the answer is there: else no conversation could go on in between
                self._answers.pop(number, None)
                self._num_done += 1
        with self._lock:
            if number in self._answers and isinstance(outcome, Lost):
                self._lost.append(outcome)
            elif number in self._answers and isinstance(outcome, Failed):
                self._failure = self._failure or outcome.error
        self._event.set()

    def _forget(self, number: int, work: Future[None]) -> None:
        """Give up a request whose conversation is over."""
        work.cancel()
        with self._lock:
            self._answers.pop(number, None)
            self._lost = [one for one in self._lost if one.request.number != number]
        self._event.set()
