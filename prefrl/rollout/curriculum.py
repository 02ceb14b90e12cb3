"""Which prompts to ask next: those that the policy solves now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from prefrl.errors import ConfigError, DataError
from prefrl.rollout.selection import random_generator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["CurriculumWeighting", "SuccessCurriculum", "draw_rows"]

CurriculumWeighting = Literal["variance", "band"]


def draw_rows(weights: NDArray[np.float64], num_rows: int, *, generator: np.random.Generator) -> list[int]:
    """Draw dataset rows one after another without replacement, each time with chances in proportion to weights.

    The rows with the smallest E_i / w_i, where the E_i are standard exponential, come in just that order and with just
    those chances: one pass over the dataset for the whole batch.

    Args:
        weights: [R], >= 0; a row of weight 0 is never drawn.
        num_rows: How many; fewer come back if fewer have a weight.
        generator: Of this draw.

    Source: Efraimidis and Spirakis 2006, Information Processing Letters 97(5)
    """
    arrivals = generator.standard_exponential(len(weights))
    possible = np.flatnonzero(weights > 0)
    order = np.argsort(arrivals[possible] / weights[possible], kind="stable")[:num_rows]
    rows: list[int] = possible[order].tolist()
    return rows


@dataclass
class SuccessCurriculum:
    """How often each prompt of the dataset is solved, and which prompts to ask instead of too easy and too hard ones.

    A group's success is its mean reward on a scale where `reward_bounds` are 0 and 1, cut off there. A prompt's rate p
    is the first success seen and then an exponential moving average:

        p <- momentum * p + (1 - momentum) * success

    Prompts outside the band are replaced by others, drawn with the weight p (1 - p) + floor, the variance of a right
    or wrong answer ("variance"), or 1 + floor inside the band and floor outside ("band"). A prompt that was never
    asked counts as inside, with p = 1/2, so it is asked once before it can be left out. Estimates of prompts that are
    left out grow old while the policy learns: `floor` is what lets them be asked again, and with 0 nothing does.

    The policy is trained on another mixture of prompts than the dataset, by intention: what is optimized is not the
    dataset's mean reward.

    Args:
        num_rows: R, size of the dataset.
        reward_bounds: Rewards of a failure and of a success.
        target_band: Lowest and highest rate of prompts that are asked as they come.
        weighting: See above.
        floor: See above, >= 0.
        momentum: See above, in 0 .. 1, 1 excluded.

    Raises:
        ConfigError: Bounds or band are not in order.
    """

    num_rows: int
    reward_bounds: tuple[float, float]
    target_band: tuple[float, float]
    weighting: CurriculumWeighting
    floor: float
    momentum: float
    rates: NDArray[np.float64] = field(init=False)  # [R]; 0 where never asked
    counts: NDArray[np.int64] = field(init=False)  # [R] groups seen

    def __post_init__(self) -> None:
        """Check the options; nothing was seen yet."""
        low, high = self.reward_bounds
        if not low < high:
            raise ConfigError(
                f"reward_bounds={self.reward_bounds}: the first, a failure, needs to be below the second"
            )
        low, high = self.target_band
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"target_band={self.target_band}: needs 0 <= low <= high <= 1, shares of success")
        self.rates = np.zeros(self.num_rows)
        self.counts = np.zeros(self.num_rows, dtype=np.int64)

    def update(self, rows: Sequence[int], groups: Sequence[int], rewards: Sequence[float]) -> None:
        """Learn from completions of all ranks, before any of them is left out.

        Groups are taken by number, so it does not matter which rank had which.

        Args:
            rows: [B] dataset row of each completion's prompt.
            groups: [B] group of each completion.
            rewards: [B]; NaN says nothing.
        """
        seen: dict[tuple[int, int], list[float]] = {}
        for row, group, reward in zip(rows, groups, rewards, strict=True):
            if not math.isnan(reward):
                seen.setdefault((group, row), []).append(reward)
        low, high = self.reward_bounds
        for (_, row), values in sorted(seen.items()):
            success = min(max((math.fsum(values) / len(values) - low) / (high - low), 0.0), 1.0)
            momentum = self.momentum if self.counts[row] else 0.0
            self.rates[row] = momentum * self.rates[row] + (1 - momentum) * success
            self.counts[row] += 1

    @property
    def is_in_band(self) -> NDArray[np.bool_]:
        """[R] prompts that are asked as they come."""
        low, high = self.target_band
        return np.asarray((self.counts == 0) | ((self.rates >= low) & (self.rates <= high)))

    @property
    def weights(self) -> NDArray[np.float64]:
        """[R] chances of being drawn, not normalized."""
        if self.weighting == "band":
            return self.is_in_band.astype(np.float64) + self.floor
        rates = np.where(self.counts == 0, 0.5, self.rates)
        return np.asarray(rates * (1 - rates) + self.floor)

    def choose(self, candidates: Sequence[int], *, seed: int, generation: int) -> list[int]:
        """The prompts of a generation batch: the candidates, and others in the slots of those outside the band.

        Args:
            candidates: Dataset rows of all ranks, by slot: the number of the prompt's group.
            seed: Of the run.
            generation: Number of the generation batch.

        Returns:
            As many rows, without new repetitions. A candidate outside the band stays where no other row is left.
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
        """Go on from what `state_dict` gave.

        Raises:
            DataError: It is of a dataset of another size.
        """
        if len(state["counts"]) != self.num_rows:
            raise DataError(
                f"the checkpoint's curriculum knows {len(state['counts'])} prompts, train_dataset has "
                f"{self.num_rows}: resume with the same dataset"
            )
        self.rates = state["rates"].numpy().copy()
        self.counts = state["counts"].numpy().copy()
