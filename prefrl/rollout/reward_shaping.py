"""Shapes total rewards, in this order, before advantages are computed from them.

| step | hyperparameter | total becomes |
|---|---|---|
| 1 | stop_properly_penalty_coef c | R * c for truncated completions if c >= 0, or c itself if c < 0 |
| 2 | missing_eos_penalty p | R - p for completions that were cut off or aborted |
| 3 | normalize | (R - mean) / std, or R / std, with running moments |
| 4 | clip_range (low, high) | min(max(R, low), high) |

Clipping comes last, so its bounds have the unit that enters the advantages: that of the rewards, or their running
standard deviation. The total of a completion without any reward is NaN and stays NaN.

The penalty of DAPO and cosmos-rl for the last tokens before the length limit is a reward function,
`prefrl.rewards.get_soft_overlong_punishment(max_completion_length, buffer)`; its factor is its reward weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from prefrl.options.rollout import ShapingParams
from prefrl.types import FinishReason


@dataclass
class RunningMoments:
    """Mean and standard deviation of all values so far.

    The sums of a batch are computed exactly and then rounded, so they depend neither on the order of its rows nor on
    the number of ranks.
    """

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0  # sum of squared distances from the mean

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The moments of some values; NaN is ignored.

        Raises:
            ValueError: A value is infinite.
        """
        numbers = [value for value in values if not math.isnan(value)]
        if any(math.isinf(value) for value in numbers):
            raise ValueError("rewards contain an infinite value: each needs to be finite, or NaN for no reward")
        if not numbers:
            return cls()
        # Relative to the lowest value, so that equal values have exactly zero variance.
        lowest = min(numbers)
        mean = lowest + math.fsum(value - lowest for value in numbers) / len(numbers)
        return cls(len(numbers), mean, math.fsum((value - mean) ** 2 for value in numbers))

    @property
    def std(self) -> float:
        """Standard deviation with denominator n - 1; 0 for fewer than two values."""
        return math.sqrt(self.sum_of_squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> None:
        """Include further values: those of all ranks, in any order.

        Raises:
            ValueError: A value is infinite.

        Source: Chan, Golub and LeVeque 1983, The American Statistician 37(3)
        """
        new = self.of(values.detach().double().flatten().tolist())
        count = self.count + new.count
        if not new.count:
            return
        difference, share = new.mean - self.mean, new.count / count
        self.mean += difference * share
        self.sum_of_squares += new.sum_of_squares + difference**2 * self.count * share
        self.count = count

    def normalized(self, values: Tensor, *, subtract_mean: bool) -> Tensor:
        """Values divided by the standard deviation so far, or by 1 while all values so far are equal.

        Args:
            values: [B].
            subtract_mean: Whether to subtract the mean first. It cancels in advantages that compare completions, but
                not in those of a single completion.
        """
        shift = self.mean if subtract_mean else 0.0
        return ((values.double() - shift) / (self.std or 1.0)).to(values.dtype)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, which JSON stores without rounding."""
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self.sum_of_squares = float(state["sum_of_squares"])


def stop_properly(totals: Tensor, finish_reasons: Sequence[FinishReason], *, coefficient: float) -> Tensor:
    """Scale or replace the rewards of completions that were cut off at the length limit.

    Scaling moves a reward toward 0, which is a penalty for positive rewards but a benefit for negative ones.

    Args:
        totals: [B].
        finish_reasons: [B].
        coefficient: In 0 .. 1: multiply the rewards by it; below 0: set the rewards to it.

    Returns:
        [B].

    Raises:
        ValueError: Lengths differ, or `coefficient` is above 1.

    Source: OpenRLHF, `stop_properly_penalty_coef`, after ProRL v2
    """
    if not coefficient <= 1:
        raise ValueError(f"coefficient={coefficient}: needs to be in 0..1 to scale, or below 0 to replace the reward")
    is_truncated = _where(finish_reasons, totals, reasons={"length"})
    penalized = totals * coefficient if coefficient >= 0 else totals.new_full((), coefficient)
    return torch.where(is_truncated & ~totals.isnan(), penalized, totals)


def minus_missing_eos(totals: Tensor, finish_reasons: Sequence[FinishReason], *, penalty: float) -> Tensor:
    """Subtract a penalty from the rewards of completions that were cut off at the length limit or aborted.

    Args:
        totals: [B].
        finish_reasons: [B]. A stop string also counts as an end; TRL looks only for the end-of-sequence token.
        penalty: The amount to subtract, > 0.

    Returns:
        [B].

    Raises:
        ValueError: Lengths differ, or `penalty` is not positive.

    Source: TRL, `missing_eos_penalty`
    """
    if not penalty > 0:
        raise ValueError(f"penalty={penalty}: needs to be > 0, because it is subtracted")
    return torch.where(_where(finish_reasons, totals, reasons={"length", "abort"}), totals - penalty, totals)


def clipped(totals: Tensor, *, low: float, high: float) -> Tensor:
    """Rewards clipped to bounds; NaN stays NaN.

    Args:
        totals: [B].
        low: Lower bound.
        high: Upper bound, above `low`.

    Raises:
        ValueError: The bounds are not in order.

    Source: TRL's RLOO, `reward_clip_range`
    """
    if not low < high:
        raise ValueError(f"low={low}, high={high}: the lower bound needs to be below the upper one")
    return totals.clamp(low, high)


def shaped(
    totals: Tensor,
    finish_reasons: Sequence[FinishReason],
    params: ShapingParams,
    *,
    moments: RunningMoments | None,
    subtract_mean: bool,
) -> Tensor:
    """Apply all steps of this module in order; a step whose hyperparameter is None is skipped.

    Args:
        totals: [B] weighted sums of rewards over all ranks, NaN for rows without a reward.
        finish_reasons: [B].
        params: See `stop_properly`, `minus_missing_eos` and `clipped`.
        moments: Running moments, to `normalize`; None: not normalized. They include these totals before normalizing,
            so the first batch is normalized, too.
        subtract_mean: See `RunningMoments.normalized`.

    Returns:
        [B], in the dtype of `totals`.

    Raises:
        ValueError: An option is invalid for its step.
    """
    if params.stop_properly_penalty_coef is not None:
        totals = stop_properly(totals, finish_reasons, coefficient=params.stop_properly_penalty_coef)
    if params.missing_eos_penalty is not None:
        totals = minus_missing_eos(totals, finish_reasons, penalty=params.missing_eos_penalty)
    if moments is not None:
        moments.update(totals)
        totals = moments.normalized(totals, subtract_mean=subtract_mean)
    if params.clip_range is not None:
        low, high = params.clip_range
        totals = clipped(totals, low=low, high=high)
    return totals


def _where(finish_reasons: Sequence[FinishReason], totals: Tensor, *, reasons: set[FinishReason]) -> Tensor:
    """[B] bool: whether each row finished for one of `reasons`."""
    if totals.shape != (len(finish_reasons),):
        raise ValueError(f"totals {tuple(totals.shape)}, {len(finish_reasons)} finish reasons: both need to be [B]")
    return torch.tensor([reason in reasons for reason in finish_reasons], dtype=torch.bool, device=totals.device)
