"""Advantages of turns, against numbers worked out by hand."""

import pytest
import torch

from prefrl.losses.advantage.tokens import turn_advantages

NAN = float("nan")


def advantages(episodes, groups, *, discount=1.0, epsilon=None, dtype=torch.float64):
    """Advantages of each episode's turns, from lists of their rewards."""
    lengths = [len(rewards) for rewards in episodes]
    found = turn_advantages(
        torch.tensor([reward for rewards in episodes for reward in rewards], dtype=dtype),
        torch.arange(len(episodes)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor(groups),
        discount=discount,
        epsilon=epsilon,
    )
    assert found.dtype == dtype
    return [turns.tolist() for turns in found.split(lengths)]


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


def test_an_episode_that_is_over_counts_as_0_in_the_baselines_of_later_turns():
    # Returns: (7, 6, 4), (5, 3) and (1); the baseline of turn 2 of the first is (3 + 0) / 2, of turn 3 it is 0.
    found = advantages([[1.0, 2.0, 4.0], [2.0, 3.0], [1.0]], [5, 5, 5])
    check(found, [[7 - 6 / 2, 6 - 3 / 2, 4.0], [5 - 8 / 2, 3 - 6 / 2], [1 - 12 / 2]])


def test_later_rewards_are_discounted_for_each_turn():
    # Returns: (1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4) and (2 + 3 / 2, 3).
    found = advantages([[1.0, 2.0, 4.0], [2.0, 3.0]], [0, 0], discount=0.5)
    check(found, [[3 - 3.5, 4.0 - 3, 4.0], [3.5 - 3, 3 - 4.0]])


@pytest.mark.parametrize("dropped", [[9.0, NAN, 9.0], [NAN], []])
def test_an_episode_without_a_reward_gets_0_and_enters_no_baseline(dropped):
    found = advantages([[1.0, 2.0], dropped, [4.0], [8.0]], [0, 0, 0, 1])
    check(found, [[3.0 - 4.0, 2.0], [0.0] * len(dropped), [4.0 - 3.0], [0.0]])


def test_an_episode_whose_group_has_no_other_reward_gets_0():
    assert advantages([[1.0, 2.0], [NAN, 1.0], [5.0]], [0, 0, 1]) == [[0.0, 0.0], [0.0, 0.0], [0.0]]


def test_half_precision_is_only_the_precision_of_the_result():
    """2048 + 1 is not a number of float16, 2049 - 2048 is."""
    assert advantages([[2048.0, 1.0], [2048.0]], [0, 0], dtype=torch.float16) == [[1.0, 1.0], [-1.0]]


def test_no_turns_have_no_advantages():
    assert advantages([[], []], [0, 0]) == [[], []]


@pytest.mark.parametrize(
    ("rewards", "episodes", "num_episodes", "message"),
    [
        ([1.0, 2.0], [0], 1, r"rewards \(2,\), episode_index \(1,\)"),
        ([[1.0], [2.0]], [[0], [1]], 2, r"rewards \(2, 1\), groups \(2,\): need to be \[U\] and \[B\]"),
        ([1.0, 2.0], [1, 0], 2, "episode_index decreases"),
        ([1.0, 2.0], [0, 2], 2, "episode_index from 0 to 2: needs to be in 0 .. 1"),
        ([1.0, 2.0], [-1, 0], 2, "episode_index from -1 to 0: needs to be in 0 .. 1"),
        ([1.0, float("inf")], [0, 1], 2, "infinite"),
    ],
)
def test_turns_that_do_not_fit_are_errors(rewards, episodes, num_episodes, message):
    groups = torch.zeros(num_episodes, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        turn_advantages(torch.tensor(rewards), torch.tensor(episodes), groups, discount=1.0)


def test_the_scale_is_the_deviation_around_the_means_of_the_turns():
    # Returns: (3, 1), (1) and (2, 2); around the means 2 and 1 the squares are 1 + 1 + 0 and 0 + 1 + 1, of 2 + 2 free.
    scaled = advantages([[2.0, 1.0], [1.0], [0.0, 2.0]], [5, 5, 5], epsilon=0.5)
    check(scaled, [[1.5 / 1.5, 0.0], [-1.5 / 1.5], [0.0, 1.5 / 1.5]])


def test_one_turn_is_scaled_like_a_completion():
    found = advantages([[1.0], [2.0], [6.0]], [5, 5, 5], epsilon=1e-4)
    std = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).std().item()
    check(found, [[x * 1.5 / (std + 1e-4)] for x in (-2.0, -1.0, 3.0)])


def test_the_scale_of_a_group_does_not_depend_on_longer_episodes_of_others():
    alone = advantages([[1.0, 2.0], [2.0]], [0, 0], epsilon=1e-4)
    check(advantages([[1.0, 2.0], [2.0], [1.0] * 9, [2.0]], [0, 0, 1, 1], epsilon=1e-4)[:2], alone)
    check(advantages([[1.0, 2.0], [2.0], [NAN] * 9], [0, 0, 0], epsilon=1e-4)[:2], alone)


def test_equal_totals_of_episodes_of_different_lengths_have_bounded_advantages():
    found = advantages([[0.0, 1.0], [1.0], [1.0]], [5, 5, 5], epsilon=1e-4)
    assert max(abs(value) for turns in found for value in turns) < 3
    assert advantages([[1.0, 0.0], [1.0], [1.0]], [5, 5, 5], epsilon=1e-4) == [[0.0, 0.0], [0.0], [0.0]]
