"""Dynamic sampling: groups whose rewards are all equal teach nothing, so other prompts are asked in their place.

    resampling = Resampling(rows, num_rows=len(dataset), seed=seed, generation=number)
    while True:
        mine = signal_values(collected.rollouts, metric=metric)
        everyone = [pair for part in gather_objects(mine) for pair in part]
        unused = groups_without_signal(everyone)
        if not unused or resampling.tries == max_tries:
            break
        redrawn = resampling.redraw(unused)
        again = {group: resampling.sample_seed(group) for group in my_groups if group in redrawn}
        request = ask([dataset[redrawn[group]] for group in again], seeds=again, ...)
        collected = replace_groups(collected, collector.collect(request))

Whether to go on is decided from what all ranks gathered, so all of them make the same number of tries, also those
without a group to replace. Groups that are still without a signal after the last try stay: they have advantage 0.

Prompts that are always or never solved give way to others, so the batch follows another mixture of prompts than the
dataset. Within a prompt, keeping the groups that differ leaves out those that do not, whose gradient is 0 without a KL
or entropy term.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prefrl.errors import ConfigError
from prefrl.metrics import Mean, Metric
from prefrl.rollout.collect import Collected
from prefrl.rollout.curriculum import draw_rows
from prefrl.rollout.selection import random_generator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prefrl.types import Rollout

__all__ = ["Resampling", "groups_without_signal", "replace_groups", "signal_values"]


def signal_values(rollouts: Sequence[Rollout], *, metric: str | None) -> list[tuple[int, float]]:
    """What decides whether a group has a signal: each completion's group and value, NaN for none.

    Args:
        rollouts: With rewards and, if no metric is named, totals.
        metric: Name of a reward function, whatever its weight; None: the total.

    Raises:
        ConfigError: There is no reward of this name.
    """
    if metric is None:
        return [(rollout.group, rollout.reward) for rollout in rollouts]
    values: list[tuple[int, float]] = []
    for rollout in rollouts:
        if metric not in rollout.rewards:
            raise ConfigError(
                f"filter_reward_metric={metric!r}: no reward function has this name; choose one of "
                f"{sorted(rollout.rewards)}, or None for the total reward"
            )
        value = rollout.rewards[metric]
        values.append((rollout.group, math.nan if value is None else value))
    return values


def groups_without_signal(values: Sequence[tuple[int, float]]) -> list[int]:
    """Groups whose values are all equal, exactly; NaN has no say. Also those with fewer than two values.

    Args:
        values: Group and value of completions, of all ranks.

    Returns:
        Their numbers, ascending.
    """
    distinct: dict[int, set[float]] = {}
    for group, value in values:
        distinct.setdefault(group, set()).update([] if math.isnan(value) else [value])
    return sorted(group for group, found in distinct.items() if len(found) < 2)


@dataclass
class Resampling:
    """The tries to fill one generation batch with groups that have a signal; the same on every rank.

    Args:
        rows: [P] dataset row asked in each slot, over all ranks; a slot is the number of its group.
        num_rows: R, size of the dataset.
        seed: Of the run.
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
        """Rows of the batch are not drawn again."""
        self.rows = list(self.rows)
        self._asked = set(self.rows)

    def redraw(self, slots: Collection[int], *, weights: NDArray[np.float64] | None = None) -> dict[int, int]:
        """Begin another try: dataset rows for slots without a signal.

        No row that this generation batch has asked comes again; where none is left, a slot's own row is asked again.

        Args:
            slots: Groups without a signal, of all ranks.
            weights: [R] chances of dataset rows, as a curriculum gives them; None: all the same.

        Returns:
            slot -> dataset row, by slot.
        """
        self.tries += 1
        chances = np.ones(self.num_rows) if weights is None else weights.astype(np.float64)
        chances[list(self._asked)] = 0.0
        # The same random order of the dataset in every try: how slots fall into tries does not change what they get.
        generator = random_generator("resample", self.seed, self.generation)
        drawn = draw_rows(chances, len(slots), generator=generator)
        self._asked.update(drawn)
        self._replaced.update(slots)
        for slot, row in zip(sorted(slots), drawn, strict=False):
            self.rows[slot] = row
        return {slot: self.rows[slot] for slot in sorted(slots)}

    def sample_seed(self, slot: int) -> int:
        """The random seed of the samples of a slot's prompt in this try."""
        generator = random_generator("resampled prompt", self.seed, self.generation, self.tries, slot)
        return int(generator.integers(2**63))

    def metrics(self, slots: Collection[int], without_signal: Collection[int]) -> dict[str, Metric]:
        """Tries of this generation batch, share of groups that were replaced, and share still without a signal.

        Args:
            slots: Groups of this rank, so that each is counted once over all ranks.
            without_signal: Groups after the last try, of any rank.
        """
        mine = set(slots)
        return {
            "dynamic_sampling/tries": Mean(self.tries, 1),
            "dynamic_sampling/replaced_ratio": Mean(len(mine & self._replaced), len(mine)),
            "dynamic_sampling/no_signal_ratio": Mean(len(mine & set(without_signal)), len(mine)),
        }


def replace_groups(collected: Collected, new: Collected) -> Collected:
    """The rollouts with some groups replaced, and what was logged beside them.

    Args:
        collected: Rollouts of this rank.
        new: Rollouts in the place of those of the same groups; may be none.

    Returns:
        All groups by number, with the columns that reward functions logged. Their metrics are averages over the
        rollouts of a call, so those of the first call stand for what is kept of it. `reward_s` is the time of both.
    """
    fresh = {rollout.group for rollout in new.rollouts}
    kept = [i for i, rollout in enumerate(collected.rollouts) if rollout.group not in fresh]
    return Collected.concat([collected.select(kept), new])
