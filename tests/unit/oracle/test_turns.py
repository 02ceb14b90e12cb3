"""Claims about credit for turns hold to 1e-10, where the policy stops after the first turn or goes on to others."""

import functools

import pytest
import torch

from prefrl.losses.advantage.estimators import rloo
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.options.policy_gradient import AdvantageParams
from prefrl.scripts.oracle.exact import END, agreement, estimate, every_batch, exact_gradient, make_problem
from prefrl.scripts.oracle.recipe import Recipe, centered_turns, credit_of_turns, reinforce_loss, row_advantages

EPISODE = row_advantages(lambda scored: rloo(scored, AdvantageParams()))
CENTERED = credit_of_turns(centered_turns)
GROUP_SIZES = pytest.mark.parametrize("group_size", [2, 3])


def by_return(discount=1.0):
    return credit_of_turns(functools.partial(turn_advantages, discount=discount))


def problem(**changes):
    return make_problem(**({"num_prompts": 1, "num_tokens": 3, "length": 2, "num_features": 5, "seed": 3} | changes))


def measured(p, advantages, group_size):
    found = estimate(every_batch(p, group_size=group_size), Recipe(reinforce_loss, advantages))
    return agreement(found, -exact_gradient(p, "reward"))


def test_turns_are_paid_for_the_rise_of_the_critics_value_and_rows_for_all_of_it():
    p = problem(num_tokens=2)
    p = p.replace(critic=torch.tensor([5.0, 0.5]).double(), rewards=torch.tensor([1.0, 2.0, 4.0]).double())
    seen = {}
    credit = credit_of_turns(lambda rewards, episodes, groups: seen.update(r=rewards, e=episodes, g=groups) or rewards)
    credit(every_batch(p, group_size=1))
    # Stop: 1. Go on: 0.5 for the first turn, which leads to the second prefix, the rest for the second.
    assert seen["r"].tolist() == [1.0, 0.5 - 0.0, 2.0 - 0.5, 0.5, 3.5]


@GROUP_SIZES
@pytest.mark.parametrize("sizes", [{}, {"num_features": None}, {"num_tokens": 2, "length": 3}], ids=str)
def test_returns_and_whole_episodes_minus_those_of_the_others_are_unbiased(sizes, group_size):
    for advantages in (by_return(), EPISODE):
        assert measured(problem(**sizes), advantages, group_size).bias < 1e-10


@GROUP_SIZES
def test_returns_have_less_noise_than_whole_episodes(group_size):
    noise = [measured(problem(), advantages, group_size).noise for advantages in (by_return(), EPISODE)]
    assert noise[0] < 0.95 * noise[1]


@GROUP_SIZES
def test_rewards_centered_at_each_turn_are_biased_only_if_the_policy_decides_when_to_stop(group_size):
    p = problem(num_features=None)
    assert measured(p, CENTERED, group_size).bias > 0.1
    policy = p.policy.view(-1, 3).clone()
    policy[0, END] = -100.0  # nobody stops in the first turn
    p = p.replace(policy=policy.flatten(), sampler=policy.flatten(), old=policy.flatten())
    assert measured(p, CENTERED, group_size).bias < 1e-10


def test_a_discount_is_biased():
    assert measured(problem(), by_return(discount=0.5), 2).bias > 0.1
