"""Properties of balanced rewards that hold for any batch."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.advantage.balance import NASH_RIDGE, REWARD_BALANCES, RewardBalancer, gram, squared_weights

quick = settings(max_examples=40, deadline=None, derandomize=True)
HYPERPARAMETERS = {
    "uncertainty": {"rate": 0.3},
    "gradnorm": {"alpha": 1.5, "rate": 0.3},
    "famo": {"rate": 2.0, "decay": 0.05},
    "pareto": {"smoothing": 0.5},
}
every_balance = pytest.mark.parametrize("balance", REWARD_BALANCES)


@st.composite
def histories(draw):
    """One to four batches of B rows and K rewards with advantages, and weights of the rewards.

    Some rewards are copies or opposites of others, equal for all rows, or have nothing to say.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_rewards = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(["own", "own", "copy", "opposite", "equal", "none"]), min_size=num_rewards,
                          max_size=num_rewards))  # fmt: skip
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        rewards = torch.randn(draw(st.integers(2, 8)), num_rewards, generator=generator, dtype=torch.float64)
        for k, kind in enumerate(kinds):
            replaced = {"copy": rewards[:, 0], "opposite": -rewards[:, 0], "equal": torch.tensor(0.5),
                        "none": torch.tensor(torch.nan)}  # fmt: skip
            rewards[:, k] = replaced.get(kind, rewards[:, k])
        advantages = rewards - rewards.mean(0)
        advantages = torch.where((rewards == rewards[0]).all(0) | rewards.isnan(), 0.0, advantages)
        lengths = torch.randint(0, 9, (len(rewards),), generator=generator)
        batches.append((rewards, advantages, lengths))
    weights = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 5.0]), min_size=num_rewards, max_size=num_rewards))
    return batches, weights


def make(balance, weights):
    params = REWARD_BALANCES[balance].params(**HYPERPARAMETERS.get(balance, {}))
    return RewardBalancer(balance, params, reward_weights=weights)


def matrix_of(advantages, lengths):
    return gram(advantages, squared_weights(lengths, reduction="sequence_mean"))


@quick
@given(history=histories(), cut=st.integers(0, 8))
def test_gram_adds_up_over_shards(history, cut):
    for _, advantages, lengths in history[0]:
        parts = matrix_of(advantages[:cut], lengths[:cut]) + matrix_of(advantages[cut:], lengths[cut:])
        torch.testing.assert_close(parts, matrix_of(advantages, lengths))


@every_balance
@quick
@given(history=histories())
def test_alphas_are_finite_and_share_out_the_length_of_fixed_weights(balance, history):
    batches, weights = history
    balancer = make(balance, weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        alphas = balancer.weights(matrix, rewards)
        norms = matrix.diagonal().sqrt()
        fixed = torch.tensor(weights, dtype=torch.float64)
        assert ((alphas >= 0) & alphas.isfinite()).all()
        torch.testing.assert_close((alphas * norms).sum(), (fixed * norms).sum(), rtol=1e-12, atol=0.0)
        silent = (norms == 0) | (fixed == 0)
        assert torch.equal(alphas[silent], fixed[silent])


@every_balance
@quick
@given(history=histories(), data=st.data())
def test_order_of_rewards_changes_nothing(balance, history, data):
    batches, weights = history
    order = torch.tensor(data.draw(st.permutations(range(len(weights)))))
    plain, shuffled = make(balance, weights), make(balance, [weights[k] for k in order.tolist()])
    for rewards, advantages, lengths in batches:
        expected = plain.weights(matrix_of(advantages, lengths), rewards)
        found = shuffled.weights(matrix_of(advantages[:, order], lengths), rewards[:, order])
        torch.testing.assert_close(found, expected[order], rtol=1e-8, atol=1e-12)


@every_balance
@quick
@given(history=histories())
def test_state_goes_through_json(balance, history):
    batches, weights = history
    balancer, resumed = make(balance, weights), make(balance, weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        resumed.load_state_dict(json.loads(json.dumps(balancer.state_dict(), allow_nan=False)))
        assert resumed.weights(matrix, rewards).tolist() == balancer.weights(matrix, rewards).tolist()
        assert resumed.state_dict() == balancer.state_dict()


@quick
@given(history=histories())
def test_nash_solves_its_equation(history):
    batches, weights = history
    balancer = make("nash", weights)
    for rewards, advantages, lengths in batches:
        matrix = matrix_of(advantages, lengths)
        alphas = balancer.weights(matrix, rewards)
        powers = torch.tensor(weights, dtype=torch.float64)
        active = (matrix.diagonal() > 0) & (powers > 0)
        if active.any():
            matrix = (matrix + NASH_RIDGE * torch.diag(matrix.diagonal()))[active][:, active]
            products = alphas[active] * (matrix @ alphas[active]) / powers[active]
            torch.testing.assert_close(products, products.mean().expand_as(products), rtol=1e-9, atol=0.0)
