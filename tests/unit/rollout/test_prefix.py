"""Common prefixes of completions whose rewards contradict each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prefrl.rollout.selection import contested_prefix_lengths

NAN = math.nan


def lengths(
    completions: list[list[int]], rewards: list[float], groups: list[int] | None = None, *, min_tokens: int = 1
) -> list[int]:
    groups = [0] * len(rewards) if groups is None else groups
    return contested_prefix_lengths(completions, rewards, groups, min_tokens=min_tokens)


def test_a_prefix_is_contested_up_to_where_rewards_part() -> None:
    completions = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7, 8]]
    # 0 and 1 agree; both share 2 tokens with 2, which disagrees. 3 shares nothing.
    assert lengths(completions, [1.0, 1.0, 0.0, 0.0]) == [2, 2, 2, 0]
    assert lengths(completions, [1.0, 0.0, 0.0, 0.0]) == [3, 3, 2, 0]
    assert lengths(completions, [1.0, 1.0, 1.0, 0.0]) == [0, 0, 0, 0]


def test_a_branch_above_a_deeper_one_is_contested_too() -> None:
    completions = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4, 5, 0, 0]]
    assert lengths(completions, [1.0, 0.0, 1.0]) == [7, 7, 5]


@pytest.mark.parametrize(("min_tokens", "expected"), [(1, [3, 3, 2]), (2, [3, 3, 2]), (3, [3, 3, 0]), (4, [0, 0, 0])])
def test_shorter_prefixes_are_left_alone(min_tokens: int, expected: list[int]) -> None:
    completions = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    assert lengths(completions, [1.0, 0.0, 0.0], min_tokens=min_tokens) == expected


def test_groups_do_not_meet() -> None:
    completions = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4]]
    assert lengths(completions, [1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1]) == [0, 0, 0, 0]
    assert lengths(completions, [1.0, 0.0, 1.0, 0.0], [0, 1, 1, 0]) == [2, 2, 2, 2]


def test_completions_that_are_wholly_shared_are_masked_wholly() -> None:
    assert lengths([[1, 2], [1, 2], [1, 2, 3], []], [0.0, 1.0, 0.0, 2.0]) == [2, 2, 2, 0]


def test_a_completion_without_a_reward_masks_nothing_and_is_not_masked() -> None:
    completions = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]]
    assert lengths(completions, [1.0, NAN, NAN]) == [0, 0, 0]
    # Between the two in lexical order: what they share is counted across it.
    assert lengths(completions, [1.0, NAN, 0.0]) == [3, 0, 3]


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_longest_prefix_shared_with_another_reward(seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = 9
    completions = [generator.integers(0, 2, generator.integers(0, 7)).tolist() for _ in range(size)]
    rewards = generator.choice([0.0, 1.0, NAN], size, p=[0.4, 0.4, 0.2]).tolist()
    groups = generator.integers(0, 2, size).tolist()

    def shared(a: int, b: int) -> int:
        differs = groups[a] != groups[b] or not abs(rewards[a] - rewards[b]) > 0
        pairs = list(zip(completions[a], completions[b], strict=False))
        return 0 if differs else next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))

    expected = [max(shared(a, b) for b in range(size)) for a in range(size)]
    assert lengths(completions, rewards, groups) == expected
    assert lengths(completions, rewards, groups, min_tokens=3) == [n if n >= 3 else 0 for n in expected]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=0: needs to be >= 1"):
        lengths([[1]], [1.0], min_tokens=0)
    with pytest.raises(ValueError, match="1 completions, 2 rewards, 2 groups"):
        lengths([[1]], [1.0, 2.0])
