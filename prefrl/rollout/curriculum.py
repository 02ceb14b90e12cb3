"""A curriculum that prefers prompts that the policy solves some of the time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefrl.errors import DataError
from prefrl.options.rollout import CurriculumParams, CurriculumWeighting
from prefrl.rollout.selection import random_generator


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
