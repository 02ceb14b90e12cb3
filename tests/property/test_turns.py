"""Properties of the advantages of turns that hold for any episodes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.advantage.estimators import ScoredRows, rloo
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.options.policy_gradient import AdvantageParams

quick = settings(max_examples=50, deadline=None, derandomize=True)
NAN = float("nan")
DISCOUNTS = st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def episodes(draw, *, min_turns=0, max_turns=4):
    """Pairs of a group and the rewards of the turns; some have no reward, some no turn."""
    reward = st.one_of(st.integers(-8, 8).map(lambda i: i / 4), st.floats(-1, 1))
    turns = st.lists(reward, min_size=min_turns, max_size=max_turns)
    without = turns.filter(len).map(lambda rewards: [*rewards[:-1], NAN]) if max_turns else turns
    episode = st.tuples(st.integers(0, 2), st.one_of(turns, turns, turns, without))
    return draw(st.lists(episode, min_size=1, max_size=8))


def advantages(given_episodes, discount=1.0):
    """[turns] of each episode."""
    lengths = [len(rewards) for _, rewards in given_episodes]
    return turn_advantages(
        torch.tensor([reward for _, rewards in given_episodes for reward in rewards], dtype=torch.float64),
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor([group for group, _ in given_episodes]),
        discount=discount,
    ).split(lengths)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other, dtype=torch.float64), atol=1e-9, rtol=1e-9)


def rloo_of(totals, groups):
    rewards = torch.tensor(totals, dtype=torch.float64)[:, None]
    rows = ScoredRows(rewards, torch.ones(1), torch.tensor(groups), torch.ones(len(groups), dtype=torch.long))
    return rloo(rows, AdvantageParams()).values


@quick
@given(batch=episodes(), discount=DISCOUNTS)
def test_each_advantage_is_the_return_minus_the_mean_of_the_others(batch, discount):
    def from_turn(rewards, turn):
        return sum(reward * discount**later for later, reward in enumerate(rewards[turn:]))

    def has_reward(rewards):
        return len(rewards) > 0 and not any(reward != reward for reward in rewards)

    expected = []
    for number, (group, rewards) in enumerate(batch):
        others = [r for j, (g, r) in enumerate(batch) if j != number and g == group and has_reward(r)]
        expected.append(
            [from_turn(rewards, t) - sum(from_turn(r, t) for r in others) / len(others) for t in range(len(rewards))]
            if has_reward(rewards) and others
            else [0.0] * len(rewards)
        )
    assert_same(advantages(batch, discount), expected)


@quick
@given(batch=episodes(), discount=DISCOUNTS, data=st.data())
def test_advantages_follow_their_episodes_in_any_order(batch, discount, data):
    order = data.draw(st.permutations(range(len(batch))))
    found = advantages([(1000 - 7 * batch[i][0], batch[i][1]) for i in order], discount)
    expected = advantages(batch, discount)
    assert_same(found, [expected[i] for i in order])


@quick
@given(batch=episodes(min_turns=1), discount=DISCOUNTS, data=st.data())
def test_an_episode_that_is_cut_off_before_turns_without_rewards_changes_nothing(batch, discount, data):
    number = data.draw(st.integers(0, len(batch) - 1))
    group, rewards = batch[number]
    longer = [*batch[:number], (group, [*rewards, *[0.0] * data.draw(st.integers(1, 3))]), *batch[number + 1 :]]
    found = advantages(longer, discount)
    lengths = [len(rewards) for _, rewards in batch]
    assert_same([values[:length] for values, length in zip(found, lengths, strict=True)], advantages(batch, discount))


@quick
@given(batch=episodes(min_turns=1, max_turns=1), discount=DISCOUNTS)
def test_episodes_of_one_turn_have_the_advantages_of_rloo(batch, discount):
    groups, totals = [group for group, _ in batch], [rewards[0] for _, rewards in batch]
    assert torch.equal(torch.cat(advantages(batch, discount)), rloo_of(totals, groups))


@quick
@given(batch=episodes(min_turns=1))
def test_without_a_discount_the_first_turns_have_the_advantages_of_rloo_with_whole_episodes(batch):
    groups, totals = [group for group, _ in batch], [sum(rewards) for _, rewards in batch]
    first = torch.stack([values[0] for values in advantages(batch)])
    torch.testing.assert_close(first, rloo_of(totals, groups), atol=1e-9, rtol=1e-9)


@quick
@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=5),
    num_episodes=st.integers(1, 7),
    zeros=st.integers(0, 2),
    discount=st.sampled_from([0.3, 1.0]),
)
def test_equal_returns_have_advantages_of_exactly_0(rewards, num_episodes, zeros, discount):
    """Also in episodes that end at different turns, if nothing is paid there."""
    batch = [(0, rewards + [0.0] * (i % (zeros + 1))) for i in range(num_episodes)]
    assert not any(values.any() for values in advantages(batch, discount))
