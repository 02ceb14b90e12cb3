"""Which completions are learned from, and which of their tokens."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from prefrl.options.rollout import SelectionRule
from prefrl.rollout.selection import contested_prefix_lengths, draw_counts, kept_rows, random_generator

NAN = math.nan


def keep(
    rewards: list[float],
    groups: list[int] | None = None,
    *,
    num: int,
    rule: SelectionRule = "max_variance",
    seed: int = 0,
    step: int = 0,
) -> list[int]:
    groups = [0] * len(rewards) if groups is None else groups
    rows = kept_rows(torch.tensor(rewards), torch.tensor(groups), keep=num, rule=rule, seed=seed, step=step)
    assert rows.dtype == torch.long
    return rows.tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("offset", [0.0, -7.0, 1e12])
def test_max_variance_is_the_largest_of_all_subsets(seed: int, offset: float) -> None:
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 10))
    # Multiples of 1/4 with repetitions: variances are exact, and equal ones occur.
    rewards = (generator.integers(-6, 7, size) / 4 + offset).tolist()
    for num in range(1, size + 1):
        rows = kept_rows(
            torch.tensor(rewards, dtype=torch.float64),
            torch.zeros(size, dtype=torch.long),
            keep=num,
            rule="max_variance",
            seed=0,
            step=0,
        )
        best = max(statistics.pvariance(subset) for subset in itertools.combinations(rewards, num))
        assert len(rows) == len(set(rows.tolist())) == num
        assert statistics.pvariance([rewards[row] for row in rows]) == best


def test_max_variance_by_hand() -> None:
    # Two low and one high: variance 16 / 9 * 2 = 3.56 beats one low and two high (4, 3, 0: 2.89).
    assert keep([0.0, 4.0, 0.0, 3.0], num=3) == [0, 1, 2]


def test_max_variance_of_right_and_wrong_is_half_of_each() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    kept = keep(rewards, num=4)
    assert sum(rewards[row] for row in kept) == 2


def test_max_variance_prefers_high_rewards_where_it_has_a_choice() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert sum(rewards[row] for row in keep(rewards, num=3)) == 2
    assert keep([2.0, 5.0, 3.0], num=1) == [1]


def test_max_variance_takes_all_of_a_rare_kind() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert sum(rewards[row] for row in keep(rewards, num=4)) == 3


def test_best_keeps_the_highest_and_the_first_of_equals() -> None:
    assert keep([1.0, 3.0, 2.0, 3.0, 2.0], num=3, rule="best") == [1, 2, 3]


def test_each_group_keeps_its_own() -> None:
    rewards, groups = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0], [5, 2, 5, 2, 5, 2]
    assert keep(rewards, groups, num=1, rule="best") == [0, 5]
    assert keep(rewards, groups, num=2) == [0, 1, 4, 5]


@pytest.mark.parametrize("rule", ["max_variance", "best", "random"])
def test_rows_without_a_reward_only_fill_up(rule: SelectionRule) -> None:
    rewards = [NAN, 1.0, NAN, 2.0, NAN, 3.0]
    assert set(keep(rewards, num=2, rule=rule)) < {1, 3, 5}
    assert keep(rewards, num=4, rule=rule) == [0, 1, 3, 5]
    assert keep(rewards, num=9, rule=rule) == [0, 1, 2, 3, 4, 5]
    assert keep([NAN, NAN, NAN], num=2, rule=rule) == [0, 1]


def test_random_is_even_over_steps_and_repeats_for_equal_numbers() -> None:
    rewards = [0.0, 0.0, 1.0, 1.0]
    times = np.zeros(4)
    for step in range(2000):
        times[keep(rewards, num=2, rule="random", step=step)] += 1
    assert times / 2000 == pytest.approx(0.5, abs=0.04)
    draws = [keep(rewards * 8, num=6, rule="random", seed=seed, step=step) for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[0] == keep(rewards * 8, num=6, rule="random", seed=0, step=0)


def test_random_rows_of_a_group_depend_on_its_number_not_on_its_place() -> None:
    rewards = [0.0] * 20
    together = keep(rewards, [3] * 10 + [8] * 10, num=4, rule="random")
    swapped = keep(rewards, [8] * 10 + [3] * 10, num=4, rule="random")
    alone = keep(rewards[:10], [8] * 10, num=4, rule="random")
    assert [row - 10 for row in together if row >= 10] == [row for row in swapped if row < 10] == alone
    assert [row for row in together if row < 10] == [row - 10 for row in swapped if row >= 10] != alone


def count(
    rewards: list[float], groups: list[int] | None = None, *, method: str = "pow", power: float = 2.0, step: int = 0
) -> list[int]:
    groups = list(range(len(rewards))) if groups is None else groups
    counts = draw_counts(
        torch.tensor(rewards),
        torch.tensor(groups),
        method=method,  # type: ignore[arg-type]
        power=power,
        seed=1,
        step=step,
    )
    assert counts.dtype == torch.long
    assert int(counts.sum()) == len(rewards)
    return counts.tolist()


@pytest.mark.parametrize(
    ("method", "power", "shares"),
    [
        ("pow", 2.0, [1 / 15, 4 / 15, 1 / 15, 9 / 15, 0.0]),  # squares 1 4 1 9 0
        ("pow", 1.0, [1 / 7, 2 / 7, 1 / 7, 3 / 7, 0.0]),
        ("pow", 0.0, [0.2] * 5),
        ("max_min", 2.0, [0.0, 0.5, 0.0, 0.5, 0.0]),
        ("max_random", 2.0, [0.125, 0.125, 0.125, 0.5, 0.125]),
    ],
)
def test_rows_are_drawn_in_proportion_to_their_weights(method: str, power: float, shares: list[float]) -> None:
    rewards = [1.0, -2.0, -1.0, 3.0, 0.0]
    total = np.sum([count(rewards, method=method, power=power, step=step) for step in range(2000)], axis=0)
    assert total / total.sum() == pytest.approx(shares, abs=0.015)
    assert [share == 0 for share in total] == [share == 0 for share in shares]


def test_a_power_of_large_rewards_does_not_overflow() -> None:
    assert count([1e30, 0.0], power=20.0) == [2, 0]


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rows_without_a_reward_are_not_drawn(method: str) -> None:
    for step in range(50):
        assert count([NAN, 1.0, NAN, 2.0], method=method, step=step)[::2] == [0, 0]
    assert count([NAN, NAN], method=method) == [1, 1]


def test_rewards_of_zero_alone_are_drawn_evenly() -> None:
    total = np.sum([count([0.0, NAN, 0.0], step=step) for step in range(500)], axis=0)
    assert total / total.sum() == pytest.approx([0.5, 0.0, 0.5], abs=0.04)


def test_the_order_of_ranks_does_not_change_what_is_drawn() -> None:
    rewards = np.random.default_rng(0).normal(size=24)
    groups = np.repeat(np.arange(8), 3)
    reference = np.array(count(rewards.tolist(), groups.tolist()))
    # Two ranks that share each half of the batch: groups 0 1 4 5 and 2 3 6 7.
    order = np.concatenate([np.flatnonzero(np.isin(groups, part)) for part in ([0, 1, 4, 5], [2, 3, 6, 7])])
    assert count(rewards[order].tolist(), groups[order].tolist()) == reference[order].tolist()
    assert count(rewards.tolist(), groups.tolist(), step=1) != reference.tolist()


def test_streams_of_different_purposes_differ() -> None:
    draws = [random_generator(*key).random() for key in (("a", 1, 2), ("b", 1, 2), ("a", 2, 1), ("a", 1, 2))]
    assert len(set(draws)) == 3
    assert draws[0] == draws[3]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0: needs to be >= 1"):
        keep([1.0], num=0)
    with pytest.raises(ValueError, match="infinite"):
        keep([1.0, math.inf], num=1)
    with pytest.raises(ValueError, match="infinite"):
        count([1.0, -math.inf])
    with pytest.raises(ValueError, match="power=-1"):
        count([1.0], power=-1)
    with pytest.raises(ValueError, match=r"rewards \(2,\), groups \(1,\): both need to be \[B\]"):
        keep([1.0, 2.0], [0], num=1)


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


def test_prefixes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=0: needs to be >= 1"):
        lengths([[1]], [1.0], min_tokens=0)
    with pytest.raises(ValueError, match="1 completions, 2 rewards, 2 groups"):
        lengths([[1]], [1.0, 2.0])
