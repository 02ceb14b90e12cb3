"""Dynamic sampling: groups whose rewards are all equal have no learning signal, so their prompts are replaced.

    resampling = Resampling(rows, num_rows=len(dataset), seed=seed, generation=number)
    while True:
        mine = signal_values(collected.rollouts, metric=metric)
        everyone = [pair for part in gather_objects(mine) for pair in part]
        unused = groups_without_signal(everyone)
        if not unused or resampling.tries == max_tries:
            break
        redrawn = resampling.redraw(unused)
        again = {group: resampling.sample_seed(group) for group in my_groups if group in redrawn}
        request = collector.ask([dataset[redrawn[group]] for group in again], sampling, again)
        collected = replace_groups(collected, collector.collect(request))

All ranks decide from the same gathered values whether to continue, so all of them make the same number of tries, even
those without a group to replace. Groups that still have no signal after the last try stay, with advantage 0.

Prompts that are always or never solved are replaced, so the batch has a different mixture of prompts than the dataset.
For a given prompt, the groups that are dropped are those with equal rewards, whose gradient is 0 without a KL or
entropy term.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefrl.errors import ConfigError
from prefrl.metrics import Mean, Metric
from prefrl.rollout.collect import Collected
from prefrl.rollout.curriculum import draw_rows
from prefrl.rollout.selection import random_generator
from prefrl.types import Rollout


def signal_values(rollouts: Sequence[Rollout], *, metric: str | None) -> list[tuple[int, float]]:
    """The values that decide whether a group has a signal: the group and value of each completion, NaN for no value.

    Args:
        rollouts: Rollouts with rewards and, if `metric` is None, totals.
        metric: Name of a reward function, whatever its weight; None: the total reward.

    Raises:
        ConfigError: There is no reward of this name.
    """
    if metric is None:
        return [(rollout.group, rollout.reward) for rollout in rollouts]
    values: list[tuple[int, float]] = []
    for rollout in rollouts:
        if metric not in rollout.rewards:
            raise ConfigError(
                f"dynamic_sampling_kwargs: reward_metric={metric!r}: no reward function has this name; choose one of "
                f"{sorted(rollout.rewards)}, or None for the total reward"
            )
        value = rollout.rewards[metric]
        values.append((rollout.group, math.nan if value is None else value))
    return values


def groups_without_signal(values: Sequence[tuple[int, float]]) -> list[int]:
    """Groups whose values are all exactly equal, or that have fewer than two values. NaN is ignored.

    Args:
        values: Group and value of each completion, over all ranks.

    Returns:
        The numbers of these groups, ascending.
    """
    distinct: dict[int, set[float]] = {}
    for group, value in values:
        distinct.setdefault(group, set()).update([] if math.isnan(value) else [value])
    return sorted(group for group, found in distinct.items() if len(found) < 2)


@dataclass
class Resampling:
    """The tries to fill one generation batch with groups that have a signal; the same on every rank.

    Args:
        rows: [P] dataset row of each slot, over all ranks; a slot is a group number.
        num_rows: R, size of the dataset.
        seed: Seed of the run.
        generation: Number of the generation batch.
    """

    rows: list[int]
    num_rows: int
    seed: int
    generation: int
    tries: int = field(default=0, init=False)
    _replaced: set[int] = field(default_factory=set, init=False)
    _asked: set[int] = field(init=False)

    def __post_init__(self) -> None:
        """Mark the rows of the batch as used, so that they are not drawn again."""
        self.rows = list(self.rows)
        self._asked = set(self.rows)

    def redraw(self, slots: Collection[int], *, weights: NDArray[np.float64] | None = None) -> dict[int, int]:
        """Begin another try: draw dataset rows for slots without a signal.

        A row that was already used in this generation batch is not drawn again. If no other row is left, the slot
        keeps its row, whose prompt is sampled again.

        Args:
            slots: Groups without a signal, over all ranks.
            weights: [R] sampling weights of dataset rows, as from a curriculum; None: uniform.

        Returns:
            slot -> dataset row, sorted by slot.
        """
        self.tries += 1
        chances = np.ones(self.num_rows) if weights is None else weights.astype(np.float64)
        chances[list(self._asked)] = 0.0
        # Every try uses the same random order of the dataset, so the drawn rows do not depend on how slots fall into
        # tries.
        generator = random_generator("resample", self.seed, self.generation)
        drawn = draw_rows(chances, len(slots), generator=generator)
        self._asked.update(drawn)
        self._replaced.update(slots)
        for slot, row in zip(sorted(slots), drawn, strict=False):
            self.rows[slot] = row
        return {slot: self.rows[slot] for slot in sorted(slots)}

    def sample_seed(self, slot: int) -> int:
        """The random seed for sampling a slot's prompt in this try."""
        generator = random_generator("resampled prompt", self.seed, self.generation, self.tries, slot)
        return int(generator.integers(2**63))

    def metrics(self, slots: Collection[int], without_signal: Collection[int]) -> dict[str, Metric]:
        """Number of tries, share of groups that were replaced, and share of groups that still have no signal.

        Args:
            slots: Groups of this rank, so that each is counted once over all ranks.
            without_signal: Groups without a signal after the last try, over all ranks.
        """
        mine = set(slots)
        return {
            "dynamic_sampling/tries": Mean(self.tries, 1),
            "dynamic_sampling/replaced_ratio": Mean(len(mine & self._replaced), len(mine)),
            "dynamic_sampling/no_signal_ratio": Mean(len(mine & set(without_signal)), len(mine)),
        }


def replace_groups(collected: Collected, new: Collected) -> Collected:
    """Replace some groups of rollouts, along with what reward functions logged for them.

    Args:
        collected: Rollouts of this rank.
        new: Rollouts that replace those of the same groups; may be empty.

    Returns:
        All groups sorted by number, with the columns that reward functions logged. Logged metrics are averages over
        the rollouts of a call, so for the kept part those of the first call are used. `reward_s` is the sum of both.
    """
    fresh = {rollout.group for rollout in new.rollouts}
    kept = [i for i, rollout in enumerate(collected.rollouts) if rollout.group not in fresh]
    return Collected.concat([collected.select(kept), new])
