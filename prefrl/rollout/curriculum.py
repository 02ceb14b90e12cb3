"""Which prompts are sampled: a curriculum prefers those that the policy solves some of the time.

Dynamic sampling: groups whose rewards are all equal have no learning signal, so their prompts are replaced.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefrl.errors import ConfigError, DataError, RewardError
from prefrl.metrics import Mean, Metric
from prefrl.options.rollout import CurriculumParams, CurriculumWeighting
from prefrl.rollout.collect import Collected
from prefrl.rollout.selection import random_generator
from prefrl.types import Rollout


def draw_rows(weights: NDArray[np.float64], num_rows: int, *, generator: np.random.Generator) -> list[int]:
    """Draw dataset rows one after another without replacement, with probabilities in proportion to their weights.

    Sorting the rows by E_i / w_i, where the E_i are standard exponential, gives exactly this distribution, in the
    order of the draws. It takes one pass over the dataset for the whole batch.

    Args:
        weights: [R], >= 0; a row of weight 0 is never drawn.
        num_rows: Number of rows to draw; fewer are returned if fewer have a positive weight.
        generator: Random generator of this draw.

    Source: Efraimidis and Spirakis 2006, Information Processing Letters 97(5)
    """
    arrivals = generator.standard_exponential(len(weights))
    possible = np.flatnonzero(weights > 0)
    order = np.argsort(arrivals[possible] / weights[possible], kind="stable")[:num_rows]
    rows: list[int] = possible[order].tolist()
    return rows


@dataclass
class SuccessCurriculum:
    """Tracks the success rate of each prompt, and replaces prompts that are too easy or too hard.

    The success of a group is its mean reward, scaled so that `reward_bounds` become 0 and 1, and clipped to them. The
    rate p of a prompt is its first success, and from then on an exponential moving average:

        p <- momentum * p + (1 - momentum) * success

    Prompts whose rate is outside the band are replaced by others, drawn with the weight p (1 - p) + floor, where
    p (1 - p) is the variance of a right or wrong answer ("variance"), or with 1 + floor inside the band and floor
    outside ("band"). A prompt that was never sampled counts as inside, with p = 1/2, so every prompt is sampled once
    before it can be replaced. The rates of replaced prompts become outdated while the policy learns. Only `floor` lets
    such prompts be sampled again; with floor 0 they are not.

    By design, the policy is trained on a different mixture of prompts than the dataset's, so it does not optimize the
    mean reward over the dataset.

    Args:
        num_rows: R, size of the dataset.
        weighting: See above.
        params: See above.
    """

    num_rows: int
    weighting: CurriculumWeighting
    params: CurriculumParams
    rates: NDArray[np.float64] = field(init=False)  # [R]; 0 for prompts that were never sampled
    counts: NDArray[np.int64] = field(init=False)  # [R] number of groups seen

    def __post_init__(self) -> None:
        """Start without observations."""
        self.rates = np.zeros(self.num_rows)
        self.counts = np.zeros(self.num_rows, dtype=np.int64)

    def update(self, rows: Sequence[int], groups: Sequence[int], rewards: Sequence[float]) -> None:
        """Update the rates with the completions of all ranks, before any of them is replaced.

        Groups are processed by number, so their distribution over ranks does not matter.

        Args:
            rows: [B] dataset row of each completion's prompt.
            groups: [B] group of each completion.
            rewards: [B]; NaN is ignored.
        """
        seen: dict[tuple[int, int], list[float]] = {}
        for row, group, reward in zip(rows, groups, rewards, strict=True):
            if not math.isnan(reward):
                seen.setdefault((group, row), []).append(reward)
        low, high = self.params.reward_bounds
        for (_, row), values in sorted(seen.items()):
            success = min(max((math.fsum(values) / len(values) - low) / (high - low), 0.0), 1.0)
            momentum = self.params.momentum if self.counts[row] else 0.0
            self.rates[row] = momentum * self.rates[row] + (1 - momentum) * success
            self.counts[row] += 1

    @property
    def is_in_band(self) -> NDArray[np.bool_]:
        """[R] whether a prompt is kept, not replaced."""
        low, high = self.params.band
        return np.asarray((self.counts == 0) | ((self.rates >= low) & (self.rates <= high)))

    @property
    def weights(self) -> NDArray[np.float64]:
        """[R] sampling weights, not normalized."""
        if self.weighting == "band":
            return self.is_in_band.astype(np.float64) + self.params.floor
        rates = np.where(self.counts == 0, 0.5, self.rates)
        return np.asarray(rates * (1 - rates) + self.params.floor)

    def choose(self, candidates: Sequence[int], *, seed: int, generation: int) -> list[int]:
        """The prompts of a generation batch: the candidates, of which those outside the band are replaced.

        Args:
            candidates: Dataset rows of all ranks; the position of a row is its group number (its slot).
            seed: Seed of the run.
            generation: Number of the generation batch.

        Returns:
            The same number of rows, without new duplicates. A candidate outside the band stays if no other is left.
        """
        weights = self.weights
        weights[list(candidates)] = 0.0
        slots = np.flatnonzero(~self.is_in_band[list(candidates)]).tolist()
        drawn = draw_rows(weights, len(slots), generator=random_generator("curriculum", seed, generation))
        chosen = list(candidates)
        for slot, row in zip(slots, drawn, strict=False):
            chosen[slot] = row
        return chosen

    def state_dict(self) -> dict[str, Tensor]:
        """`rates` [R] float64 and `counts` [R] int64."""
        return {"rates": torch.from_numpy(self.rates.copy()), "counts": torch.from_numpy(self.counts.copy())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            DataError: The state belongs to a dataset of another size.
        """
        if len(state["counts"]) != self.num_rows:
            raise DataError(
                f"the checkpoint's curriculum knows {len(state['counts'])} prompts, but train_dataset has "
                f"{self.num_rows}: resume with the same dataset"
            )
        self.rates = state["rates"].numpy().copy()
        self.counts = state["counts"].numpy().copy()


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


def groups_without_any_signal(of_ranks: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> list[int]:
    """Groups that have no signal in any of several rewards, ascending.

    Args:
        of_ranks: For each rank and reward, `signal_values`; all ranks have the same rewards.
    """
    of_rewards = [[pair for part in parts for pair in part] for parts in zip(*of_ranks, strict=True)]
    silent = [set(groups_without_signal(values)) for values in of_rewards]
    return sorted(set.intersection(*silent))


@dataclass
class Resampling:
    """The tries to fill one generation batch with groups that have a signal; the same on every rank.

    Args:
        rows: [P] dataset row of each slot, over all ranks; a slot is a group number.
        num_rows: R, size of the dataset.
        seed: Seed of the run.
        generation: Number of the generation batch.
        is_endless: Whether the caller goes on until every group has a signal.
    """

    rows: list[int]
    num_rows: int
    seed: int
    generation: int
    is_endless: bool = False
    tries: int = field(default=0, init=False)
    _num_before: int | None = field(
        default=None, init=False
    )  # slots without a signal before this pass over the dataset
    _replaced: set[int] = field(default_factory=set, init=False)
    _asked: set[int] = field(init=False)

    def __post_init__(self) -> None:
        """Mark the rows of the batch as used, so that they are not drawn again."""
        self.rows = list(self.rows)
        self._asked = set(self.rows)

    def redraw(self, slots: Collection[int], *, weights: NDArray[np.float64] | None = None) -> dict[int, int]:
        """Begin another try: draw dataset rows for slots without a signal.

        A row that was already used in this generation batch is not drawn again. If no other row is left, the slot
        keeps its row, whose prompt is sampled again. Without a limit of tries, another pass over the dataset begins
        then, from which the rows of the other slots are left out.

        Args:
            slots: Groups without a signal, over all ranks.
            weights: [R] sampling weights of dataset rows, as from a curriculum; None: uniform.

        Returns:
            slot -> dataset row, sorted by slot.

        Raises:
            RewardError: Without a limit of tries: a pass over the dataset has found no group with a signal.
        """
        self.tries += 1
        if self.is_endless:
            self._begin_pass_if_due(slots)
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

    def _begin_pass_if_due(self, slots: Collection[int]) -> None:
        if self._num_before is None:
            self._num_before = len(slots)
        if len(self._asked) < self.num_rows:
            return
        if self.tries > 1 and len(slots) >= self._num_before:
            raise RewardError(
                f"dynamic_sampling: in {self.tries - 1} tries, a pass over all {self.num_rows} prompts of the dataset "
                f"found none whose completions differ in their rewards, for {len(slots)} of the {len(self.rows)} "
                "prompts of a generation batch. Check the rewards, raise num_generations or temperature, or limit the "
                "tries: set max_tries of dynamic_sampling_kwargs to a positive number."
            )
        self._num_before = len(slots)
        self._asked = {row for slot, row in enumerate(self.rows) if slot not in slots}

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
    fresh = {rollout.group: rollout.episode for rollout in new.rollouts}
    for rollout in collected.rollouts:
        heir, episode = fresh.get(rollout.group), rollout.episode
        if heir is not None and episode is not None:  # tokens that were sampled in vain are accounted for
            heir.num_sampled += episode.num_sampled
            heir.num_dropped += episode.num_sampled
    kept = [i for i, rollout in enumerate(collected.rollouts) if rollout.group not in fresh]
    return Collected.concat([collected.select(kept), new])
