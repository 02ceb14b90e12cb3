"""What k samples of a prompt are worth: pass@k, best@k and maj@k, their means over prompts, and their intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_MOST_SUBSETS = 1000  # of the samples of a prompt
_NUM_RESAMPLES = 1000
_CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class PromptSamples:
    """The samples of a prompt that have a reward."""

    source: str  # where the prompt comes from; "" if that is not known
    rewards: tuple[float, ...]  # [n]
    correct: tuple[bool, ...]  # [n]
    answers: tuple[str, ...] = ()  # [n], "" for a sample without an answer; (): answers are not known


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, from n samples of which c are: 1 - C(n-c, k) / C(n, k).

    Unbiased. NaN if k > n.

    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1
    """
    if k > num_samples:
        return math.nan
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward of k samples: sum_i C(i-1, k-1) r_(i) / C(n, k), r_(1) <= ... <= r_(n).

    Unbiased: the mean over all subsets of size k. NaN if k > n.
    """
    num_subsets = math.comb(len(rewards), k)
    if num_subsets == 0:
        return math.nan
    return sum(math.comb(i, k - 1) / num_subsets * reward for i, reward in enumerate(sorted(rewards)))


def majority_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer of k samples is correct; NaN if k > n.

    The mean over all subsets of size k, or over 1000 random ones if there are more. Samples without an answer do not
    vote; without any vote, the answer is wrong. Of several most frequent answers, one is chosen at random.

    Args:
        answers: [n], "" for a sample without an answer.
        correct: [n] whether each sample is correct.
        k: Size of the subsets.
    """
    if k > len(answers):
        return math.nan
    names = sorted({answer for answer in answers if answer})
    if not names:
        return 0.0
    gives = np.array([[answer == name for name in names] for answer in answers], dtype=np.float64)  # [n, A]
    is_right = np.array(correct, dtype=np.float64) @ gives / gives.sum(0)  # [A]
    votes = _subsets(len(answers), k) @ gives  # [S, A]
    is_first = (votes == votes.max(1, keepdims=True)) & (votes > 0)
    return float(((is_first @ is_right) / np.maximum(is_first.sum(1), 1)).mean())


@cache
def _subsets(num_samples: int, k: int) -> Floats:
    """[S, n] 1 for each sample of a subset, 0 for the others."""
    if math.comb(num_samples, k) <= _MOST_SUBSETS:
        chosen = list(itertools.combinations(range(num_samples), k))
    else:
        random = np.random.default_rng(0)
        chosen = [tuple(random.choice(num_samples, k, replace=False)) for _ in range(_MOST_SUBSETS)]
    subsets = np.zeros((len(chosen), num_samples))
    np.put_along_axis(subsets, np.array(chosen), 1.0, axis=1)
    return subsets


def share_interval(shares: Sequence[float], *, most_trials: float) -> tuple[float, float]:
    """Wilson's 95% interval of the mean over prompts of values between 0 and 1.

    (p + z^2 / 2m -+ z sqrt(p (1-p) / m + z^2 / 4m^2)) / (1 + z^2 / m), where m = p (1-p) / (v / P) is how many
    independent trials have the variance of the mean of P prompts, and v is the variance of the values. If every value
    is 0 or 1, m is P.

    Args:
        shares: [P] values.
        most_trials: m is at most this.

    Source: Wilson 1927; Kish 1965 for the effective number of trials
    """
    values = np.array(shares, dtype=np.float64)
    count, p, variance = len(values), float(values.mean()), float(values.var())
    spread = p * (1.0 - p)
    trials = float(count) if spread == 0 else min(count * spread / max(variance, 1e-300), max(most_trials, count))
    z = NormalDist().inv_cdf((1.0 + _CONFIDENCE) / 2.0)
    center = (p + z * z / (2.0 * trials)) / (1.0 + z * z / trials)
    width = z * math.sqrt(spread / trials + z * z / (4.0 * trials * trials)) / (1.0 + z * z / trials)
    return min(max(center - width, 0.0), p), max(min(center + width, 1.0), p)  # rounding moves neither past p


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean over prompts, by a percentile bootstrap of 1000 resamples of the prompts.

    It has no width if all values are equal.

    Source: Efron 1979
    """
    drawn = np.random.default_rng(0).integers(len(values), size=(_NUM_RESAMPLES, len(values)))
    means = np.array(values, dtype=np.float64)[drawn].mean(1)
    low, high = np.quantile(means, [(1.0 - _CONFIDENCE) / 2.0, (1.0 + _CONFIDENCE) / 2.0])
    return float(low), float(high)


def at_k_metrics(prompts: Iterable[PromptSamples], sizes: Sequence[int]) -> dict[str, float]:
    """pass@k, best@k and maj@k with their intervals, over all prompts and for each source.

    The names are `pass@4`, `pass@4_low` and `pass@4_high`, and `pass@4/<source>` and so on for a source. Prompts with
    fewer than k samples are left out. The order of prompts and of samples changes nothing.
    """
    ordered = sorted(map(_ordered, prompts))
    sources = dict.fromkeys(prompt.source for prompt in ordered if prompt.source)
    metrics = dict(_metrics_of(ordered, sizes, ""))
    for source in sources:
        metrics |= _metrics_of([prompt for prompt in ordered if prompt.source == source], sizes, f"/{source}")
    return metrics


def _ordered(prompt: PromptSamples) -> PromptSamples:
    """The same samples in an order that depends on nothing else."""
    answers = prompt.answers or ("",) * len(prompt.rewards)
    samples = sorted(zip(prompt.rewards, prompt.correct, answers, strict=True))
    rewards, correct, named = zip(*samples, strict=True) if samples else ((), (), ())
    return PromptSamples(prompt.source, rewards, correct, named if prompt.answers else ())


def _metrics_of(prompts: Sequence[PromptSamples], sizes: Sequence[int], suffix: str) -> Iterator[tuple[str, float]]:
    for k in sizes:
        able = [prompt for prompt in prompts if len(prompt.rewards) >= k]
        if not able:
            continue
        trials = sum(len(prompt.rewards) for prompt in able) / k
        shares = {"pass": [pass_at_k(len(prompt.correct), sum(prompt.correct), k) for prompt in able]}
        if all(prompt.answers for prompt in able):
            shares["maj"] = [majority_at_k(prompt.answers, prompt.correct, k) for prompt in able]
        best = [best_at_k(prompt.rewards, k) for prompt in able]
        intervals = {name: share_interval(values, most_trials=trials) for name, values in shares.items()}
        intervals["best"] = mean_interval(best)
        for name, values in {**shares, "best": best}.items():
            low, high = intervals[name]
            yield f"{name}@{k}{suffix}", float(np.mean(values))
            yield f"{name}@{k}_low{suffix}", low
            yield f"{name}@{k}_high{suffix}", high
