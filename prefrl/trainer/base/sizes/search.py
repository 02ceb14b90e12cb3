"""Finds how many rows a micro-batch should have: by the speed and the memory of passes over the longest rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Trial", "best", "candidates", "search"]

# A larger micro-batch must be faster than the best smaller one by this factor, or it counts as no faster.
_FASTER = 1.02
# After this many sizes that are no faster, larger ones are not tried.
_PATIENCE = 2
# Of all sizes that reach this share of the best speed, the smallest is chosen: it needs the least memory.
_NEARLY_BEST = 0.99


@dataclass(frozen=True, slots=True)
class Trial:
    """What the passes over a micro-batch have shown, the same on all processes."""

    rows: int  # what per_device_train_batch_size counts
    tokens: int  # of the forward pass: prompts that rows share count once
    speed: float  # tokens of all rows, each with its own prompt, per second
    load: float  # the memory that training needs with such micro-batches, as a share of what it may need


def candidates(most: int, *, divides: bool) -> list[int]:
    """The sizes to try, each at least twice the one before: 1, 2, 4, ... and `most`.

    Args:
        most: The largest size.
        divides: Only divisors of `most`, so that all micro-batches of a step are equal.
    """
    sizes = [1]
    for size in range(2, most + 1):
        if size >= 2 * sizes[-1] and not (divides and most % size):
            sizes.append(size)
    return sizes if sizes[-1] == most else [*sizes, most]


def search(measure: Callable[[int], Trial | None], sizes: Sequence[int], *, load: float) -> list[Trial]:
    """Try sizes in ascending order, until memory would not suffice or nothing is gained any more.

    A size is not tried if the two before it predict, by a straight line, that it needs more than there is.

    Args:
        measure: Runs the passes; None: memory ran out.
        sizes: What to try; the first is always tried.
        load: What training needs without activations, as a share of what it may need.

    Returns:
        The trials of all sizes that fit; none if memory ran out in the first.
    """
    trials: list[Trial] = []
    before, num_no_faster = (0, load), 0
    for size in sizes:
        if trials and _predicted(before, trials[-1], size) > 1:
            break
        trial = measure(size)
        if trial is None or (trials and trial.load > 1):
            break
        if trials:
            before = trials[-1].rows, trials[-1].load
            is_faster = trial.speed > _FASTER * max(other.speed for other in trials)
            num_no_faster = 0 if is_faster else num_no_faster + 1
        trials.append(trial)
        if num_no_faster == _PATIENCE:
            break
    return trials


def _predicted(before: tuple[int, float], last: Trial, size: int) -> float:
    rows, load = before
    return last.load + (last.load - load) * (size - last.rows) / (last.rows - rows)


def best(trials: Sequence[Trial]) -> Trial:
    """The smallest of the sizes that are nearly as fast as the fastest."""
    fastest = max(trial.speed for trial in trials)
    return next(trial for trial in trials if trial.speed >= _NEARLY_BEST * fastest)
