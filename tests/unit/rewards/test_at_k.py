"""pass@k, best@k, maj@k and their intervals, against counting all subsets and against repeated experiments."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefrl.rewards.at_k import (
    PromptSamples,
    at_k_metrics,
    best_at_k,
    majority_at_k,
    mean_interval,
    pass_at_k,
    share_interval,
)


def majority_of(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """By hand: the share of the most frequent answers that are right."""
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right}
    return sum(answer in right for answer in first) / len(first)


SAMPLES = st.lists(st.sampled_from([("", 0.5), ("4", 1.0), ("5", 0.0), ("6", -2.0)]), min_size=1, max_size=7)


@given(SAMPLES, st.integers(1, 7))
def test_all_three_are_the_means_over_all_subsets(samples: list[tuple[str, float]], k: int) -> None:
    answers, rewards = [answer for answer, _ in samples], [reward for _, reward in samples]
    correct = [answer == "4" for answer in answers]
    found = (
        pass_at_k(len(samples), sum(correct), k),
        best_at_k(rewards, k),
        majority_at_k(answers, correct, k),
    )
    if k > len(samples):
        assert all(math.isnan(value) for value in found)
        return
    subsets = list(itertools.combinations(range(len(samples)), k))
    expected = (
        np.mean([any(correct[i] for i in subset) for subset in subsets]),
        np.mean([max(rewards[i] for i in subset) for subset in subsets]),
        np.mean([majority_of([answers[i] for i in s], [correct[i] for i in s]) for s in subsets]),
    )
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_majority_of_many_samples_is_estimated_from_random_subsets() -> None:
    """C(20, 5) = 15504 subsets: the estimate is within four standard errors, 4 / sqrt(4 * 1000), of all of them."""
    answers = ["4"] * 8 + ["5"] * 7 + [""] * 5
    correct = [answer == "4" for answer in answers]
    subsets = itertools.combinations(range(20), 5)
    exact = np.mean([majority_of([answers[i] for i in s], [correct[i] for i in s]) for s in subsets])
    found = majority_at_k(answers, correct, 5)
    assert found != exact
    assert found == pytest.approx(exact, abs=0.063)


def test_the_interval_of_shares_is_wilsons_if_each_prompt_is_solved_or_not() -> None:
    """7 of 10, from Wilson's formula: 0.3968 to 0.8922; none of 10: 0 to 0.2775."""
    assert share_interval([1.0] * 7 + [0.0] * 3, most_trials=10) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    low, high = share_interval([0.0] * 10, most_trials=80)
    assert (low, high) == (0.0, pytest.approx(0.2775, abs=1e-4))


def test_equal_shares_of_all_prompts_count_as_so_many_trials_as_there_are_samples() -> None:
    """10 prompts, half of 8 samples each: Wilson's interval of 40 of 80."""
    assert share_interval([0.5] * 10, most_trials=80) == pytest.approx((0.3929, 0.6071), abs=1e-4)


@pytest.mark.parametrize("is_share", [True, False])
def test_intervals_cover_the_mean_in_about_95_of_100_experiments(is_share: bool) -> None:
    """40 prompts with success rates of their own, 4 samples each: the rate of coverage is 0.95 +- 4 * 0.011."""
    random = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        rates = random.beta(0.5, 1.0, size=40)
        shares = (random.binomial(4, rates) / 4).tolist()
        low, high = share_interval(shares, most_trials=160) if is_share else mean_interval(shares)
        covered.append(low <= 1 / 3 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.044)


def test_the_bootstrap_resamples_prompts() -> None:
    """Its interval is that of a normal distribution for many prompts: mean +- 1.96 std / sqrt(P)."""
    values = np.random.default_rng(1).normal(2.0, 3.0, size=400)
    half = 1.96 * values.std() / 20
    assert mean_interval(values.tolist()) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 8)


PROMPTS = [
    PromptSamples("a", (1.0, 0.0, 0.0), (True, False, False), ("4", "5", "5")),
    PromptSamples("b", (1.0, 0.5), (True, False), ("4", "")),
    PromptSamples("", (0.0,), (False,), ("7",)),
]


def test_metrics_are_means_over_the_prompts_that_have_k_samples() -> None:
    """pass@2: a 1 - C(2, 2) / C(3, 2) = 2/3, b 1; maj@2: a (1/2 + 1/2 + 0) / 3, b 1; best@1: 1/3, 3/4, 0."""
    found = at_k_metrics(PROMPTS, [1, 2])
    expected = {
        "pass@1": (1 / 3 + 1 / 2 + 0) / 3,
        "pass@2": (2 / 3 + 1) / 2,
        "maj@2": (1 / 3 + 1) / 2,
        "best@1": (1 / 3 + 3 / 4 + 0) / 3,
        "pass@2/a": 2 / 3,
        "pass@2/b": 1.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    for name, value in found.items():
        kind, slash, source = name.partition("/")
        if not kind.endswith(("_low", "_high")):
            assert found[f"{kind}_low{slash}{source}"] <= value <= found[f"{kind}_high{slash}{source}"]


def test_neither_the_order_of_prompts_nor_that_of_samples_changes_a_digit() -> None:
    random = np.random.default_rng(0)
    prompts = [
        PromptSamples("", tuple(rewards), tuple(r > 0.8 for r in rewards), tuple(f"{r:.0f}" for r in rewards))
        for rewards in random.normal(size=(7, 12)).tolist()
    ]
    turned = [PromptSamples(p.source, p.rewards[::-1], p.correct[::-1], p.answers[::-1]) for p in reversed(prompts)]
    assert at_k_metrics(turned, [1, 6, 12]) == at_k_metrics(prompts, [1, 6, 12])
