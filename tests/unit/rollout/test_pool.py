"""Whatever finishes first, whatever is lost, and whenever the run is killed: which groups training takes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prefrl.errors import GenerationError
from prefrl.rollout.pool import GroupPool, PoolLimits, Ticket
from prefrl.types import Completion, Episode, Rollout, Turn


@dataclass
class World:
    """Servers whose requests take a random time, at times are lost, and whose weights get newer meanwhile."""

    seed: int = 0
    loss: float = 0.0  # probability that a request is lost
    slow: float = 0.3  # probability that a request takes as long as many steps
    now: float = 0.0
    step: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)  # ticket and seed of each request
    fails: int | None = None  # the ticket whose request has an error
    num_recoveries: int = 0
    finished: list[Rollout] = field(default_factory=list)
    released: list[Rollout] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def pause(self) -> None:
        self.now += 0.1

    def recover(self) -> None:
        self.num_recoveries += 1

    def ask(self, tickets: Sequence[Ticket]) -> Requests:
        assert len({ticket.number % 100 for ticket in tickets}) == len(tickets)
        return Requests(self, tickets)

    def seconds(self) -> float:
        return self.random.uniform(5, 40) if self.random.random() < self.slow else self.random.uniform(0, 2)


class Requests:
    """A `Polled`."""

    longest_silence = 50.0

    def __init__(self, world: World, tickets: Sequence[Ticket]) -> None:
        self.world, self.tickets = world, tickets
        self.lost: list[int] = []
        self.running: dict[int, tuple[float, int]] = {}  # when it ends, and the step at which it began
        self.is_cancelled = False
        self.send(range(len(tickets)))

    def send(self, which: Sequence[int]) -> None:
        for i in which:
            self.world.asked.append((self.tickets[i].number, self.tickets[i].seed))
            self.running[i] = (self.world.now + self.world.seconds(), self.world.step)

    @property
    def is_stuck(self) -> bool:
        return bool(self.lost) and not self.running

    def arrived(self) -> Iterator[tuple[int, list[Rollout]]]:
        for i, (end, begin) in [*self.running.items()]:
            if end > self.world.now:
                continue
            del self.running[i]
            if self.tickets[i].number == self.world.fails:
                raise GenerationError("the prompt is too long")
            if self.world.random.random() < self.world.loss:
                self.lost.append(i)
            else:
                self.world.finished.append(self.rollout(self.tickets[i], begin))
                yield i, self.world.finished[-1:]

    def rollout(self, ticket: Ticket, begin: int) -> Rollout:
        """Its first token is of the weights when it began, its last one of those when it ended."""
        completion = Completion([1, 2], "stop", [0.0, 0.0], [True, True], [begin, self.world.step])
        return Rollout([Turn([0], completion)], dict(ticket.row), ticket.number % 100, prompt="p", text="t")

    def repeat_lost(self) -> None:
        lost, self.lost = self.lost, []
        self.send(lost)

    def cancel(self) -> None:
        self.is_cancelled = True


def pool_of(world: World, limits: PoolLimits) -> GroupPool:
    return GroupPool(
        limits,
        prompt=lambda number: ({"prompt": f"prompt {number}"}, number + 1000),
        ask=world.ask,
        release=world.released.extend,
        recover=world.recover,
        pause=world.pause,
    )


def limits_of(size: int = 3, *, staleness: int = 4, each: int = 1, drops: bool = False) -> PoolLimits:
    return PoolLimits(size, range(size), staleness // each // 2, each, staleness, drops)


@dataclass
class Training:
    """Takes a generation batch after the other, and checks each."""

    world: World
    limits: PoolLimits
    last: int
    learned: list[list[int]] = field(default_factory=list)  # tickets by generation batch
    ages: list[int] = field(default_factory=list)

    def run(self, pool: GroupPool, first: int = 0, until: int | None = None) -> None:
        for number in range(first, (self.last if until is None else until) + 1):
            self.world.step = number * self.limits.steps_each
            request = pool.take(number, last=self.last)
            groups = dict(request.pending.as_completed())
            assert len(groups) == request.num_prompts == self.limits.num_each == len(request.tickets)
            for i, ticket in enumerate(request.tickets):
                (rollout,) = groups[i]
                assert rollout.row["prompt"] == f"prompt {ticket}"
                assert rollout.group == self.limits.groups[i]
                self.ages.append(self.world.step - min(rollout.policy_versions))
            pool.learned(request.tickets)
            self.learned.append(request.tickets)
            self.world.now += 1.0  # the time of an update

    def check(self) -> None:
        """Each prompt once, none too old."""
        everyone = sorted(ticket for batch in self.learned for ticket in batch)
        assert everyone == list(range((self.last + 1) * self.limits.num_prompts))
        assert max(self.ages) <= self.limits.max_staleness


@pytest.mark.parametrize("seed", range(20))
def test_each_prompt_is_learned_from_once_and_none_is_too_old(seed: int) -> None:
    chance = random.Random(seed)
    each = chance.choice([1, 2, 3])
    limits = limits_of(chance.randint(1, 5), each=each, staleness=each * chance.randint(2, 6) + chance.randint(0, 1))
    training = Training(World(seed, loss=chance.choice([0, 0.2])), limits, last=chance.randint(0, 20))
    training.run(pool_of(training.world, limits))
    training.check()


def test_groups_that_finish_first_are_taken_first() -> None:
    training = Training(World(1), limits_of(), last=30)
    training.run(pool_of(training.world, training.limits))
    order = [ticket for batch in training.learned for ticket in batch]
    assert sum(ticket // 3 != i // 3 for i, ticket in enumerate(order)) > 20
    assert 0 < sum(training.ages) / len(training.ages) < 3


def test_the_slowest_group_is_waited_for_when_it_would_get_too_old() -> None:
    """The first prompt takes as long as 30 batches; the bound allows two to pass by before it."""
    world = World(slow=0.0)
    seconds = iter([30.0])
    quick = world.seconds
    world.seconds = lambda: next(seconds, None) or quick()  # type: ignore[method-assign]
    training = Training(world, limits_of(2), last=20)
    training.run(pool_of(world, training.limits))
    training.check()
    assert [number for number, batch in enumerate(training.learned) if 0 in batch] == [4]
    assert world.now > 30


@pytest.mark.parametrize("seed", range(10))
def test_dropped_groups_are_asked_again_counted_and_told(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(World(seed), limits_of(drops=True), last=40)
    pool = pool_of(training.world, training.limits)
    training.run(pool)
    training.check()  # so no step was smaller
    assert pool.num_dropped == caplog.text.count("is asked again") > 0
    assert len(training.world.asked) == 41 * 3 + pool.num_dropped
    assert len(training.world.released) == pool.num_dropped
    # The same seed would draw the same long completion again.
    assert len(set(training.world.asked)) == len(training.world.asked)


def test_the_age_of_a_group_is_that_of_its_oldest_token_that_may_be_learned_from() -> None:
    """The tokens of a failed episode, and what stands for one without any, are never learned from."""

    def rollout(*versions: int, reason: Any = "stop") -> Rollout:
        count = len(versions)
        completion = Completion([1] * count, "stop", [0.0] * count, [True] * count, [*versions])
        return Rollout([Turn([0], completion)], {}, 0, "p", "t", episode=Episode("W", reason, [0.0]))

    ticket = Ticket(0, {}, 1, version=5)
    ticket.finish([rollout(9, 8), rollout(0, reason="environment_error"), rollout(7, 9)])
    assert ticket.version == 7
    ticket.version = 5
    ticket.finish([rollout(0, reason="environment_error")])
    assert ticket.version == 5


def test_what_is_given_up_is_released_and_what_is_learned_from_is_not() -> None:
    """What rollouts hold, such as environments, can be used for others."""
    world = World(slow=0.0)
    pool = pool_of(world, limits_of())
    pool.learned(pool.take(0, last=9).tickets)
    learned = [one for one in world.finished if one.row["prompt"] in {"prompt 0", "prompt 1", "prompt 2"}]
    world.now += 9
    pool.take(1, last=9)
    pool.drop()
    assert len(world.released) == len(world.finished) - 3 > 3
    assert not any(one in learned for one in world.released)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_keeps_its_ticket_and_its_seed(seed: int) -> None:
    training = Training(World(seed, loss=0.5), limits_of(), last=15)
    training.run(pool_of(training.world, training.limits))
    training.check()
    assert training.world.num_recoveries > 0
    assert all(of_request == number + 1000 for number, of_request in training.world.asked)
    assert len(training.world.asked) > 16 * 3


def test_an_error_of_a_request_is_raised_and_not_waited_out() -> None:
    world = World(slow=0.0, fails=4)
    training = Training(world, limits_of(), last=5)
    with pytest.raises(GenerationError, match="too long"):
        training.run(pool_of(world, training.limits))
    assert world.num_recoveries == 0


def test_a_request_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.seconds = lambda: float("inf")  # type: ignore[method-assign]
    monkeypatch.setattr("prefrl.rollout.pool.time.monotonic", lambda: world.now)
    with pytest.raises(GenerationError, match="no request to a vLLM server ended within 50 s"):
        pool_of(world, limits_of()).take(0, last=3)


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_goes_on_with_the_prompts_that_it_has_not_learned_from(seed: int, tmp_path: Path) -> None:
    """The checkpoint is older than the journal, and may have been written while a batch was waited for."""
    chance = random.Random(seed)
    limits = limits_of(chance.randint(1, 4), staleness=chance.randint(2, 6))
    training = Training(World(seed, loss=0.1), limits, last=12)
    pool = pool_of(training.world, limits)
    saved = chance.randint(0, 10)
    training.run(pool, until=saved - 1)
    if is_waiting := chance.random() < 0.5:
        training.world.step = saved
        pool.take(saved, last=12)
    pool.save(tmp_path / "pool.json", writes=True)
    if is_waiting:
        pool = pool_of(training.world, limits)
        pool.load(tmp_path / "pool.json", rank=0, world_size=1)
        pool.begin(saved)
    killed = chance.randint(saved - 1, 11)
    training.run(pool, saved, until=killed)
    resumed = pool_of(training.world, limits)
    resumed.load(tmp_path / "pool.json", rank=0, world_size=1)
    resumed.begin(saved)
    for batch in training.learned[saved:]:  # from the journal
        resumed.learned(batch)
    training.run(resumed, killed + 1)
    training.check()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_other_numbers_of_ranks_share_the_open_prompts(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, learned = 6, []
    all_open: list[list[int]] = []
    for rank in range(before):
        limits = PoolLimits(size, range(size * rank // before, size * (rank + 1) // before), 2, 1, 4, False)
        training = Training(World(rank), limits, last=9)
        pool = pool_of(training.world, limits)
        training.run(pool, until=4)
        learned += [ticket for batch in training.learned for ticket in batch]
        monkeypatch.setattr("prefrl.rollout.pool.gather_objects", lambda one: all_open.append(one) or all_open)
        pool.save(tmp_path / "pool.json", writes=True)
        monkeypatch.undo()
    for rank in range(after):
        limits = PoolLimits(size, range(size * rank // after, size * (rank + 1) // after), 2, 1, 4, False)
        training = Training(World(rank), limits, last=9)
        pool = pool_of(training.world, limits)
        pool.load(tmp_path / "pool.json", rank=rank, world_size=after)
        pool.begin(5)
        training.run(pool, 5)
        learned += [ticket for batch in training.learned for ticket in batch]
    assert sorted(learned) == list(range(60))


def test_another_training_begins_with_the_first_prompts() -> None:
    training = Training(World(), limits_of(), last=9)
    pool = pool_of(training.world, training.limits)
    training.run(pool, until=3)
    asked = [one.pending for one in pool._asked]
    pool.begin(0)
    assert asked
    assert all(one.is_cancelled for one in asked)
    assert len(pool) == 0
    again = Training(training.world, training.limits, last=9)
    again.run(pool)
    again.check()


def test_a_checkpoint_of_other_batches_or_of_a_run_in_order_leaves_no_prompt_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = limits_of()
    state: dict[str, Any] = {"prompts": 5, "batches": 6, "tickets": [[20, 21, 29]]}
    (tmp_path / "other.json").write_text(json.dumps(state), encoding="utf-8")
    for name in ("other.json", "none.json"):
        training = Training(World(), limits, last=9)
        pool = pool_of(training.world, limits)
        pool.load(tmp_path / name, rank=0, world_size=1)
        pool.begin(4)
        training.run(pool, 4)
        assert sorted(ticket for batch in training.learned for ticket in batch) == list(range(12, 30))
    assert caplog.text.count("have 3 prompts now, and had 5") == 1


def test_fewer_steps_ahead_after_a_resume_hold_requests_back(tmp_path: Path) -> None:
    training = Training(World(2), limits_of(staleness=8), last=12)
    pool = pool_of(training.world, training.limits)
    training.run(pool, until=4)
    pool.save(tmp_path / "pool.json", writes=True)
    training.limits = limits_of(staleness=2)
    pool = pool_of(training.world, training.limits)
    pool.load(tmp_path / "pool.json", rank=0, world_size=1)
    pool.begin(5)
    training.ages = []
    training.run(pool, 5)
    training.check()
