"""Groups by readiness: training takes those that finish first, whatever batch their prompts belong to.

A prompt of the run has a ticket. Its ticket is open from the time when the prompt may be asked for until training has
learned from its group; only then is it forgotten. So whatever interrupts a step, no prompt is lost, and none comes
twice. A run with `order: in_order` has a `PrefetchQueue` instead.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from prefrl.distributed import gather_objects
from prefrl.errors import GenerationError
from prefrl.generation.base import Polled
from prefrl.generation.vllm.pending import error_of, raise_shared
from prefrl.rollout.collect import Request, prompt_seed
from prefrl.types import Rollout

_POLL_SECONDS = 0.02
_log = logging.getLogger(__name__)


@dataclass
class Ticket:
    """A prompt of the run, and its group once that is finished."""

    number: int  # position of the prompt among those of the whole run, over all ranks
    row: Mapping[str, Any]  # of the dataset
    seed: int  # of its samples
    version: int | None = None  # optimizer step of the oldest weights that may have sampled it; None: not asked for
    rollouts: list[Rollout] = field(default_factory=list)  # empty: not finished

    def finish(self, rollouts: list[Rollout]) -> None:
        """Take the group, and note the age of the oldest token that may be learned from."""
        self.rollouts = rollouts
        versions = [version for one in rollouts if not one.has_failed for version in one.policy_versions]
        self.version = min(versions, default=self.version)


@dataclass(frozen=True)
class PoolLimits:
    """How many groups the pool has, and how old they may be.

    Args:
        num_prompts: Prompts of a generation batch, over all ranks.
        groups: Those of this rank, as positions in the batch.
        num_ahead: Generation batches that are asked for beyond the one that is needed.
        steps_each: Optimizer steps that learn from a generation batch.
        max_staleness: The most optimizer steps between the weights that sampled the oldest token of a group and those
            that first learn from it.
        drops: Whether groups that are older are discarded. Otherwise, training waits before they are.
    """

    num_prompts: int
    groups: Sequence[int]
    num_ahead: int
    steps_each: int
    max_staleness: int
    drops: bool

    @property
    def num_each(self) -> int:
        """Groups of this rank in a generation batch."""
        return len(self.groups)

    def last_batch(self, version: int | None) -> int:
        """The last generation batch that may learn from a group whose oldest token is from weights of this version."""
        return ((version or 0) + self.max_staleness) // self.steps_each


@dataclass
class _Asked:
    """Tickets that were asked for together."""

    tickets: Sequence[Ticket]
    pending: Polled[Rollout]
    num_arrived: int = 0

    @property
    def is_running(self) -> bool:
        return self.num_arrived < len(self.tickets)


@dataclass(frozen=True, slots=True)
class _Finished:
    """A `Pending` whose groups are there."""

    groups: Sequence[list[Rollout]]

    def as_completed(self) -> Iterator[tuple[int, list[Rollout]]]:
        yield from enumerate(self.groups)

    def cancel(self) -> None:
        """No-op: nothing is running."""


class GroupPool:
    """The groups of this rank that were asked for and not learned from.

    Each rank has its own tickets and takes equally many in each generation batch, so ranks need not agree on which.

    Args:
        limits: How many, and how old.
        prompt: Returns the dataset row and the seed of a ticket, by its number.
        ask: Requests the groups of some tickets, whose positions in their generation batches differ.
        release: Hears that nothing is learned from these rollouts; see `RolloutSampler`.
        recover: Waits for the servers and sends them the weights. All ranks call it together.
        pause: Waits a moment.
    """

    def __init__(
        self,
        limits: PoolLimits,
        *,
        prompt: Callable[[int], tuple[Mapping[str, Any], int]],
        ask: Callable[[Sequence[Ticket]], Polled[Rollout]],
        release: Callable[[Sequence[Rollout]], None],
        recover: Callable[[], None],
        pause: Callable[[], None] = lambda: time.sleep(_POLL_SECONDS),
    ) -> None:
        self._limits = limits
        self._prompt = prompt
        self._ask_for = ask
        self._release = release
        self._recover = recover
        self._pause = pause
        self._open: dict[int, Ticket] = {}  # by number
        self._num_batches = 0  # generation batches whose prompts have got tickets
        self._asked: list[_Asked] = []
        self._chosen: list[Ticket] | None = None  # by the generation batch that is waited for
        self.num_dropped = 0  # groups that were discarded since this was last set to 0

    def __len__(self) -> int:
        """The number of groups that were asked for and not learned from."""
        return sum(ticket.version is not None for ticket in self._open.values())

    def begin(self, first: int) -> None:
        """Begin a training, or resume one, whose first new generation batch has this number."""
        self.drop()
        if first == 0:
            self._open, self._num_batches = {}, 0
        self._num_batches = max(self._num_batches, first)

    def drop(self) -> None:
        """Cancel all requests. Their tickets stay open."""
        for asked in self._asked:
            asked.pending.cancel()
        self._asked = []
        for ticket in self._open.values():
            self._put_back(ticket)

    def _put_back(self, ticket: Ticket) -> None:
        """Forget a group: its prompt is asked again."""
        self._release(ticket.rollouts)
        ticket.version, ticket.rollouts = None, []

    def take(self, number: int, *, last: int) -> Request:
        """Wait for the groups that a generation batch learns from. All ranks must call it, after a weight sync.

        They stay in the pool until `learned`.

        Args:
            number: Number of the batch.
            last: Number of the last batch of training.

        Raises:
            GenerationError: A group could not be generated.
        """
        self._open_batches(min(number + self._limits.num_ahead, last) + 1)
        while len(self._open) < self._limits.num_each:  # the run has other limits now than at its checkpoint
            self._open_batches(self._num_batches + 1)
        while True:
            # An error, and a wait for servers that are gone, are those of all ranks.
            raise_shared(error_of(lambda: self._wait(number)))
            if not any(gather_objects(self._chosen is None)):
                break
            self._recover()
        tickets = sorted(self._chosen or [], key=lambda ticket: ticket.number)
        for group, ticket in zip(self._limits.groups, tickets, strict=True):
            for rollout in ticket.rollouts:
                rollout.group = group  # positions in this batch differ, those in the tickets' own batches may not
        return Request(
            len(tickets),
            _Finished([ticket.rollouts for ticket in tickets]),
            [ticket.seed for ticket in tickets],
            [ticket.number for ticket in tickets],
        )

    def learned(self, numbers: Sequence[int]) -> None:
        """Close tickets: their groups are in the rollout buffer now. They may come from the journal of an earlier run.

        Args:
            numbers: Of the tickets.
        """
        self._open_batches(max(numbers, default=-1) // self._limits.num_prompts + 1)
        for number in numbers:
            del self._open[number]

    def _open_batches(self, count: int) -> None:
        """Give tickets to the prompts of the first `count` generation batches."""
        size = self._limits.num_prompts
        for batch in range(self._num_batches, count):
            self._add([batch * size + group for group in self._limits.groups])
        self._num_batches = max(self._num_batches, count)

    def _add(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._open[number] = Ticket(number, *self._prompt(number))

    def _wait(self, number: int) -> None:
        """Wait until the groups of a generation batch are chosen, or cannot be before servers are back."""
        step, silence = number * self._limits.steps_each, 0.0
        self._chosen = None
        for asked in self._asked:
            asked.pending.repeat_lost()
        self._ask(step)
        while True:
            if self._receive():
                silence = 0.0
            if self._limits.drops:
                self._drop_older(number)
                self._ask(step)
            self._chosen = self._choice(number)
            running = [asked.pending for asked in self._asked]
            if self._chosen is not None or all(pending.is_stuck for pending in running):
                return
            limit = max(pending.longest_silence for pending in running)
            if silence > limit:
                raise GenerationError(f"no request to a vLLM server ended within {limit:g} s, despite its deadline")
            started = time.monotonic()
            self._pause()
            silence += time.monotonic() - started

    def _receive(self) -> bool:
        """Take the groups that have finished; whether there are any."""
        has_news = False
        for asked in self._asked:
            for i, rollouts in asked.pending.arrived():
                asked.tickets[i].finish(rollouts)
                asked.num_arrived += 1
                has_news = True
        self._asked = [asked for asked in self._asked if asked.is_running]
        return has_news

    def _ask(self, step: int) -> None:
        """Ask for the first open tickets, as many as the pool may have."""
        limits = self._limits
        tickets = sorted(self._open.values(), key=lambda ticket: ticket.number)
        room = (limits.num_ahead + 1) * limits.num_each - len(self)
        new = [ticket for ticket in tickets if ticket.version is None][: max(room, 0)]
        for _, batch in groupby(new, key=lambda ticket: ticket.number // limits.num_prompts):
            together = list(batch)
            self._asked.append(_Asked(together, self._ask_for(together)))
            for ticket in together:
                ticket.version = step

    def _drop_older(self, number: int) -> None:
        """Discard finished groups that are too old for this generation batch; their prompts are asked again."""
        step = number * self._limits.steps_each
        for ticket in self._open.values():
            version = ticket.version
            if version is not None and ticket.rollouts and self._limits.last_batch(version) < number:
                _log.warning(
                    "the completions of prompt %d of the run are discarded: the oldest token is %d optimizer steps "
                    "old, and max_staleness=%d. The prompt is asked again: %.200r",
                    ticket.number,
                    step - version,
                    self._limits.max_staleness,
                    ticket.row["prompt"],
                )
                self._put_back(ticket)
                ticket.seed = prompt_seed(ticket.seed, step, 0)
                self.num_dropped += 1

    def _choice(self, number: int) -> list[Ticket] | None:
        """The groups that a generation batch learns from: of those that are finished, the oldest ones.

        None: too few are finished, or so many others would be left that one of them would get too old.
        """
        size, last = self._limits.num_each, self._limits.last_batch
        asked = [ticket for ticket in self._open.values() if ticket.version is not None]
        asked.sort(key=lambda ticket: (not ticket.rollouts, last(ticket.version), ticket.number))
        chosen, others = asked[:size], asked[size:]
        if not all(ticket.rollouts for ticket in chosen):
            return None
        # The batches that are to come take `size` of the others each, those first that get too old first.
        due = sorted(last(ticket.version) for ticket in others)
        is_late = any(batch < number + 1 + i // size for i, batch in enumerate(due))
        return None if is_late and not self._limits.drops else chosen

    # Checkpoints.

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the open tickets of all ranks, also those of a generation batch that nothing was learned from.

        All ranks must call it.

        Args:
            path: A JSON file.
            writes: Whether this rank writes it.
        """
        tickets = gather_objects(sorted(self._open))
        if writes:
            state = {"prompts": self._limits.num_prompts, "batches": self._num_batches, "tickets": tickets}
            path.write_text(json.dumps(state), encoding="utf-8")

    def load(self, path: Path, *, rank: int, world_size: int) -> None:
        """Read what `save` wrote; of a run with another number of ranks, take this rank's share of the tickets."""
        self._open, self._num_batches = {}, 0
        if not path.exists():  # of a run that had `order: in_order`
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        size = self._limits.num_prompts
        if state["prompts"] != size:
            _log.warning(
                "generation batches have %d prompts now, and had %d: the prompts that were asked for and not learned "
                "from are left out",
                size,
                state["prompts"],
            )
            return
        self._num_batches, tickets = state["batches"], state["tickets"]
        if len(tickets) == world_size:
            self._add(tickets[rank])
            return
        everyone = sorted(number for of_rank in tickets for number in of_rank)
        batches = [everyone[first : first + size] for first in range(0, len(everyone), size)]
        self._add([batch[group] for batch in batches for group in self._limits.groups if group < len(batch)])
