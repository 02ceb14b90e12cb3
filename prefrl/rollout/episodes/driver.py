"""Plays the episodes of a generation batch: all at once, each at its own pace, on one event loop in a thread."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prefrl.data.encode import RowEncoder, of_environment
from prefrl.data.tool_calls import ToolCallReader
from prefrl.errors import EpisodeError
from prefrl.generation.base import Generator, Home, PolledTurns, SamplingParams, TurnSampler
from prefrl.rewards.call import EventLoopThread
from prefrl.rollout.episodes.environment import EnvironmentKind, Seat, Seats
from prefrl.rollout.episodes.play import EnvironmentFailure, EpisodeLimits, Played, Player, Task
from prefrl.rollout.episodes.threads import LoopWatch, MainThread, watched_loop
from prefrl.types import Completion, Episode, Rollout, Turn

if TYPE_CHECKING:
    from prefrl.rollout.episodes.agent import AgentPlayer, Agents

logger = logging.getLogger(__name__)

# How often an episode whose environment fails is begun, with environment_error="retry".
_MAX_TRIES = 3
# How much longer than a call may take the event loop may be blocked.
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class _Kind:
    """A kind of environment, and how its episodes are read."""

    kind: EnvironmentKind
    reader: ToolCallReader | None  # None: there are no tools


class EpisodeSampler:
    """Samples rollouts of several turns; see `prefrl.rollout.collect.RolloutSampler`.

    Args:
        kinds: Kinds of environments by the value of the dataset's column `environment`; None: the only one.
        readers: Read the tool calls of each kind; None: it has no tools.
        encoder: Gives the chat template of a row, with the schemas of its tools.
        generator: Returns the current generator, which may change.
        limits: Options.
    """

    def __init__(
        self,
        kinds: Mapping[str | None, EnvironmentKind],
        readers: Mapping[str | None, ToolCallReader | None],
        *,
        encoder: RowEncoder,
        generator: Callable[[], Generator],
        limits: EpisodeLimits,
    ) -> None:
        self._kinds = {name: _Kind(kind, readers[name]) for name, kind in kinds.items()}
        self._encoder = encoder
        self._generator = generator
        self.limits = limits
        self._loop = EventLoopThread()
        self.main_thread = MainThread()
        self._seats = Seats(self.main_thread, limits.tool_timeout)
        self._in_use: dict[int, Seat] = {}  # by identity of the environment, until the rollout is scored
        count = limits.max_concurrent_environments
        # Held by each episode that is played.
        self.places = asyncio.Semaphore(sys.maxsize if count is None else count)
        self._has_warned = False
        self._agents: Agents | None = None  # None: there are none yet

    def start(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> EpisodesPending:
        """Begin the episodes of some prompts.

        Args:
            rows: [P] rows of the dataset.
            groups: [P] group number of each prompt.
            sampling: How turns are sampled; `num_samples` is G.
            seeds: [P] random seeds.

        Returns:
            [P][G] rollouts, as they become ready.
        """
        return EpisodesPending(self, rows, groups, sampling.num_samples, seeds, self._generator(), sampling)

    def submit(self, work: Any) -> Future[Any]:
        """Run a coroutine on the loop."""
        return self._loop.submit(work)

    @cached_property
    def watch(self) -> LoopWatch:
        """Whether user code blocks the loop."""
        return LoopWatch(self._loop, limit=self.limits.tool_timeout + _PATIENCE_SECONDS)

    def release(self, rollouts: Sequence[Rollout]) -> None:
        """Make the environments of these rollouts free for other episodes."""
        seats = []
        for rollout in rollouts:
            if rollout.episode is not None and rollout.episode.environment is not None:
                seats.append(self._in_use.pop(id(rollout.episode.environment)))
                rollout.episode.environment = None
        if seats:
            self._loop.submit(self.give_back(seats))

    async def give_back(self, seats: Sequence[Seat]) -> None:
        """Make the places of episodes that are over free for others."""
        for seat in seats:
            self._seats.give_back(seat)

    def close(self) -> None:
        """Close all environments."""
        with suppress(TimeoutError):
            # Longer only if an async function blocks the loop: then its thread is left alone.
            self._loop.submit(self._close()).result(self.limits.tool_timeout + 1)

    async def _close(self) -> None:
        if self._agents is not None:
            await self._agents.gateway.close()
        await self._seats.close()

    async def played(
        self, row: Mapping[str, Any], group: int, seed: int, sample: Sample, sampling: SamplingParams
    ) -> Rollout:
        """The rollout of one episode, begun again if its environment fails and the options say so."""
        num_tries = _MAX_TRIES if self.limits.environment_error == "retry" else 1
        num_dropped = 0
        for _ in range(num_tries):
            player = self.player(row, seed, sample, sampling)
            seat = player.seat
            try:
                episode = await player.play()
            except BaseException as error:  # also if the episode is canceled
                self._seats.drop(seat)
                if not isinstance(error, EnvironmentFailure):
                    raise
                self._note_failure(error)
                num_dropped += player.played.num_dropped + _num_sampled(player.played.turns)
                continue
            if seat.environment is None:
                self._seats.give_back(seat)
            else:
                self._in_use[id(seat.environment)] = seat
            played = player.played
            episode.num_dropped = num_dropped + played.num_dropped
            return Rollout(played.turns, row, group, prompt=played.prompt, text=played.said, episode=episode)
        return _failed(player.seat.kind.name, player.played, row, group, num_dropped=num_dropped)

    def player(
        self, row: Mapping[str, Any], seed: int, sample: Sample, sampling: SamplingParams | None = None
    ) -> Player | AgentPlayer:
        """Who plays an episode, and where: called on the loop. Nobody else plays there until it is over."""
        own = of_environment(row, self._kinds)
        task = Task(
            row,
            self._encoder.template(row),
            own.reader,
            seed=lambda token_ids, number: seed_of(seed, 1, number, *token_ids),
            environment_seed=seed_of(seed, 0),
            sample=sample,
            context_limit=self._generator().context_limit,
            sampling=sampling,
        )
        seat = self._seats.take(own.kind)
        if own.kind.agent is None:
            return Player(task, seat, self.limits)
        from prefrl.rollout.episodes.agent import AgentPlayer, Agents  # a run without agents needs no server

        if self._agents is None:
            self._agents = Agents()
        return AgentPlayer(task, seat, self.limits, self._agents)

    def _note_failure(self, error: EnvironmentFailure) -> None:
        if self.limits.environment_error == "raise":
            raise EpisodeError(
                f"{error}. Fix the environment, or set environment_error to 'retry' or 'drop'"
            ) from error.__cause__
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. The episode is %s, because environment_error=%r; later ones like this are counted in "
                "episodes/stop_reason/environment_error",
                str(error),  # what keeps the record of this must not keep the episode, to which the error leads
                "dropped" if self.limits.environment_error == "drop" else "begun again",
                self.limits.environment_error,
            )


Sample = Callable[[Sequence[int], int, int], Awaitable[Completion]]


class EpisodesPending:
    """Episodes that are played; a `prefrl.generation.base.Pending` of rollouts, and the `Conversations` of a sampler.

    If the sampler's turns are `PolledTurns`, it is a `Polled`.

    Args: see `EpisodeSampler.start`.
    """

    def __init__(
        self,
        episodes: EpisodeSampler,
        rows: Sequence[Mapping[str, Any]],
        groups: Sequence[int],
        num_samples: int,
        seeds: Sequence[int],
        generator: Generator,
        sampling: SamplingParams,
    ) -> None:
        self._episodes = episodes
        self._turns: TurnSampler = generator.turns(sampling)
        self._sampling = sampling
        self._found: list[list[Rollout | None]] = [[None] * num_samples for _ in rows]
        self._ready: deque[tuple[int, list[Rollout]]] = deque()
        self._num_left = len(rows) * num_samples
        self._num_busy = self._num_left  # episodes that wait neither for a completion nor for others to end
        self._asked: set[Future[Completion]] = set()  # answers that episodes wait for
        self._given: set[int] = set()  # numbers of the prompts whose rollouts have been read
        self._is_canceled = False
        self._error: Exception | None = None
        self._work: list[Future[Any]] = [
            episodes.submit(self._play(number, sample, row, group, seed_of(seed, sample)))
            for number, (row, group, seed) in enumerate(zip(rows, groups, seeds, strict=True))
            for sample in range(num_samples)
        ]

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        """The number and rollouts of each prompt, once for every prompt, as they become ready.

        Raises:
            EpisodeError: A tool or an environment failed, and the options say so.
            GenerationError: A completion could not be generated.
        """
        self._episodes.main_thread.wake = self._turns.notify
        try:
            with watched_loop(self._episodes.watch, report=self._fail):
                is_left = True
                while is_left:  # ranks that serve together do so equally often, also one without a prompt
                    self._turns.serve(self)
                    if self._error is not None:
                        raise self._error
                    is_left = self._num_left > 0
                    yield from self._read()
        finally:
            self.cancel()

    def _read(self) -> Iterator[tuple[int, list[Rollout]]]:
        while self._ready:
            number, rollouts = self._ready.popleft()
            self._given.add(number)
            yield number, rollouts

    def cancel(self) -> None:
        """End all episodes that still go on, and make the environments free that nobody reads the rollouts of."""
        if self._is_canceled or len(self._given) == len(self._found):
            return
        self._is_canceled = True
        for work in self._work:
            work.cancel()
        self._episodes.submit(self._let_go())

    async def _let_go(self) -> None:
        for number, rollouts in enumerate(self._found):
            if number not in self._given:
                self._episodes.release([rollout for rollout in rollouts if rollout is not None])

    # As a `Polled`.

    longest_silence = math.inf  # each turn has a deadline of its own, and so has each call of a tool

    @property
    def _polled(self) -> PolledTurns:
        return cast("PolledTurns", self._turns)

    @property
    def is_stuck(self) -> bool:
        """See `prefrl.generation.base.Polled`."""
        return self._polled.is_stuck(self) and not self.has_news()

    def arrived(self) -> Iterator[tuple[int, list[Rollout]]]:
        """See `prefrl.generation.base.Polled`; raises what `as_completed` raises."""
        self.attend()
        error = self._error or self._polled.failure or self._episodes.watch.look()
        if error is not None:
            raise error
        yield from self._read()

    def repeat_lost(self) -> None:
        """See `prefrl.generation.base.Polled`."""
        self._polled.repeat_lost()

    # As `Conversations`.

    def has_news(self) -> bool:
        """See `Conversations`."""
        return bool(self._ready) or self._error is not None

    def is_over(self) -> bool:
        """See `Conversations`."""
        return self._num_left == 0 or self._error is not None

    def is_waiting(self) -> bool:
        """See `Conversations`."""
        return self._num_busy == 0 and not any(answer.done() for answer in tuple(self._asked))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An episode waits for something that is not its own."""
        self._num_busy -= 1
        self._turns.notify()  # the sampler may have asked `is_waiting` just before
        try:
            yield
        finally:
            self._num_busy += 1

    def attend(self) -> None:
        """See `Conversations`."""
        self._episodes.main_thread.attend()

    async def _play(self, number: int, sample: int, row: Mapping[str, Any], group: int, seed: int) -> None:
        """Play an episode, and note what became of it; on the loop, like all that follows."""
        requests = _Requests(self, self._turns, self._asked)
        try:
            with self.waiting():
                await self._episodes.places.acquire()
            try:
                rollout = await self._episodes.played(row, group, seed, requests.sampled, self._sampling)
            finally:
                self._episodes.places.release()
            num_late = await requests.num_late()
            if rollout.episode is not None:
                rollout.episode.num_sampled = requests.num_sampled
                rollout.episode.num_dropped += num_late
            self._note(number, sample, rollout)
        except Exception as error:
            self._fail(error)
        finally:
            self._num_busy -= 1
            self._turns.notify()

    def _fail(self, error: Exception) -> None:
        """Let the thread that reads the rollouts raise an error."""
        self._error = self._error or error
        self._turns.notify()

    def _note(self, number: int, sample: int, rollout: Rollout) -> None:
        self._found[number][sample] = rollout
        found = [one for one in self._found[number] if one is not None]
        if len(found) == len(self._found[number]):
            self._ready.append((number, found))
        self._num_left -= 1


class _Requests:
    """The requests of one episode to the sampler, and how many tokens came of them.

    Args:
        pending: Of all episodes.
        turns: The sampler.
        asked: The requests of all episodes that wait.
    """

    def __init__(self, pending: EpisodesPending, turns: TurnSampler, asked: set[Future[Completion]]) -> None:
        self._pending, self._turns, self._asked = pending, turns, asked
        self._home = Home()
        self._waiting = ExitStack()  # while there are requests: an agent may ask several times at once
        self._num_open = 0
        self._given_up: list[Future[Completion]] = []  # whose answer is there all the same, or will be
        self.num_sampled = 0  # tokens

    async def sampled(self, token_ids: Sequence[int], max_tokens: int, seed: int) -> Completion:
        """A completion."""
        answer = self._turns.ask(token_ids, max_tokens=max_tokens, seed=seed, home=self._home)
        self._asked.add(answer)
        if not self._num_open:
            self._waiting.enter_context(self._pending.waiting())
        self._num_open += 1
        try:
            completion = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if not answer.cancel():
                self._given_up.append(answer)
            raise
        finally:
            self._asked.discard(answer)
            self._num_open -= 1
            if not self._num_open:
                self._waiting.close()
        self.num_sampled += len(completion.token_ids)
        return completion

    async def num_late(self) -> int:
        """The tokens of answers that came after they were given up; waits for those that are being sampled."""
        with self._pending.waiting():
            late = [await asyncio.wrap_future(answer) for answer in self._given_up]
        count = sum(len(completion.token_ids) for completion in late)
        self.num_sampled += count
        return count


def _num_sampled(turns: Sequence[Turn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in turns)


def _failed(kind: str, played: Played, row: Mapping[str, Any], group: int, *, num_dropped: int) -> Rollout:
    """The rollout of an environment that failed: it has no reward, and none of its tokens is trained on."""
    turns = [Turn(turn.sent_ids, _untrained(turn.completion)) for turn in played.turns]
    if not turns:
        ids = list(row["prompt_ids"])
        turns = [Turn(ids, Completion(ids[-1:], "abort", [0.0], [False], [0]))]
    episode = Episode(kind, "environment_error", played.turn_rewards or [0.0], num_dropped=num_dropped)
    return Rollout(turns, row, group, prompt=played.prompt or row["prompt"], text=played.said, episode=episode)


def _untrained(completion: Completion) -> Completion:
    return Completion(
        completion.token_ids,
        completion.finish_reason,
        completion.logprobs,
        [False] * len(completion.token_ids),
        completion.policy_versions,
    )


def seed_of(*entropy: int) -> int:
    """A seed below 2^62, as a function of some numbers."""
    return int(np.random.SeedSequence(list(entropy)).generate_state(1, np.uint64)[0] >> np.uint64(2))
