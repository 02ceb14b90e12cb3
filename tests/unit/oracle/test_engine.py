"""The enumeration itself, against numbers worked out by hand and against a second way to compute them."""

import dataclasses
import math

import pytest
import torch

from prefrl.scripts.oracle.exact import (
    OBJECTIVES,
    Tree,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
    make_problem,
)


def problem(**changes):
    return make_problem(**({"num_prompts": 2, "num_tokens": 3, "length": 2, "num_features": 5, "seed": 3} | changes))


def reinforce(samples):
    """[T] -mean over rows of R times the log-prob of the row."""
    loss = -samples.logprobs * samples.rewards[samples.row_index]
    sums = loss.new_zeros(samples.num_batches).index_add(0, samples.batch_of_token, loss)
    return sums / (samples.num_rows / samples.num_batches)


def test_tree_lists_every_completion_once_with_the_prefix_of_each_token():
    tree = Tree.grow(num_prompts=1, num_tokens=2, length=2)
    rows = [row.tolist() for row in tree.tokens.split(tree.lengths.tolist())]
    states = [row.tolist() for row in tree.states.split(tree.lengths.tolist())]
    assert rows == [[0], [1, 0], [1, 1]]
    assert states == [[0], [0, 1], [0, 1]]
    assert tree.num_states == 2


@pytest.mark.parametrize(("num_tokens", "length", "count"), [(3, 2, 7), (4, 3, 40), (2, 4, 5), (5, 1, 5)])
def test_number_of_completions_is_that_of_the_closed_form(num_tokens, length, count):
    tree = Tree.grow(num_prompts=3, num_tokens=num_tokens, length=length)
    assert tree.num_completions == 3 * count
    assert tree.prompts.bincount().tolist() == [count] * 3
    assert len({tuple(row.tolist()) for row in tree.tokens.split(tree.lengths.tolist())}) == count


def test_prefixes_of_different_prompts_are_different():
    tree = Tree.grow(num_prompts=2, num_tokens=3, length=2)
    first = [set(tree.states[(tree.prompts == prompt)[tree.row_index]].tolist()) for prompt in (0, 1)]
    assert len(first[0] & first[1]) == 0
    assert len(first[0] | first[1]) == tree.num_states == 6


@pytest.mark.parametrize("num_features", [None, 5])
@pytest.mark.parametrize("group_size", [1, 2])
def test_probabilities_of_all_batches_add_up_to_one(num_features, group_size):
    p = problem(num_features=num_features).moved(sampler=1.0)
    assert float(every_batch(p, group_size=group_size).probabilities.sum()) == pytest.approx(1.0, abs=1e-12)


def by_hand():
    """V=2, T=2: end at once with 1 - p, then end with 1 - q. p = 0.6, q = 0.25; rewards 1, -2, 4."""
    p, q = 0.6, 0.25
    logits = torch.tensor([0.0, math.log(p / (1 - p)), 0.0, math.log(q / (1 - q))], dtype=torch.float64)
    made = problem(num_prompts=1, num_tokens=2, num_features=None)
    rewards = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    return dataclasses.replace(made, policy=logits, old=logits, sampler=logits, rewards=rewards)


def test_objective_and_gradient_of_a_tree_of_two_tokens_by_hand():
    found = by_hand()
    # The second token is worth 0.75 * -2 + 0.25 * 4 = -0.5; J = 0.4 * 1 + 0.6 * -0.5.
    assert float(OBJECTIVES["reward"](found, found.policy)) == pytest.approx(0.1, abs=1e-12)
    assert found.exact_critic.tolist() == pytest.approx([0.1, -0.5], abs=1e-12)
    # dJ/d(logit of going on) = p (1 - p) (-0.5 - 1); of the second token p * q (1 - q) (4 - -2).
    first, second = 0.24 * -1.5, 0.6 * 0.1875 * 6
    expected = [-first, first, -second, second]
    assert exact_gradient(found, "reward").tolist() == pytest.approx(expected, abs=1e-12)
    assert estimate(every_batch(found, group_size=1), reinforce).mean.tolist() == pytest.approx(
        [-value for value in expected], abs=1e-12
    )
    # The likeliest completion, token by token: go on, then end.
    assert found.greedy_rewards.tolist() == [-2.0]


def test_variance_of_one_sample_by_hand():
    # One token with chances 3/4 and 1/4 and rewards 3 and 1: gradients by the first logit are -3/4 and 3/4.
    made = problem(num_prompts=1, num_tokens=2, length=1, num_features=None)
    logits = torch.tensor([0.0, -math.log(3)], dtype=torch.float64)
    made = dataclasses.replace(
        made, policy=logits, old=logits, sampler=logits, rewards=torch.tensor([3.0, 1.0], dtype=torch.float64)
    )
    one, two = (estimate(every_batch(made, group_size=size), reinforce) for size in (1, 2))
    # Mean -3/8, variance 9/16 - 9/64 = 27/64; the second logit's gradient is its negative.
    assert one.mean.tolist() == pytest.approx([-3 / 8, 3 / 8], abs=1e-12)
    assert one.variance == pytest.approx(27 / 32, abs=1e-12)
    assert two.variance == pytest.approx(27 / 64, abs=1e-12)


@pytest.mark.parametrize("num_features", [None, 5])
@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_gradients_of_objectives_are_those_of_finite_differences(num_features, objective):
    p = problem(num_features=num_features)
    found = exact_gradient(p, objective)
    for i in range(len(p.policy)):
        step = torch.zeros_like(p.policy)
        step[i] = 1e-5
        up, down = (OBJECTIVES[objective](p, p.policy + sign * step) for sign in (1, -1))
        assert float(found[i]) == pytest.approx(float(up - down) / 2e-5, abs=1e-9)


@pytest.mark.parametrize(("whole", "by_token"), [("kl", "token_kl"), ("entropy", "token_entropy")])
def test_whole_completions_and_their_tokens_have_one_value_and_two_gradients(whole, by_token):
    p = problem()
    values = [float(OBJECTIVES[objective](p, p.policy)) for objective in (whole, by_token)]
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    assert float((exact_gradient(p, whole) - exact_gradient(p, by_token)).norm()) > 0.01


def test_whole_completions_of_one_token_have_the_gradient_of_their_token():
    p = problem(length=1)
    for whole, by_token in (("kl", "token_kl"), ("entropy", "token_entropy")):
        torch.testing.assert_close(exact_gradient(p, whole), exact_gradient(p, by_token), atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_features", [None, 5])
def test_expected_gradient_is_that_of_the_expected_loss(num_features):
    """The chain through the table of log-probs against automatic differentiation of the whole."""
    p = problem(num_features=num_features).moved(sampler=0.5)
    samples = every_batch(p, group_size=2)
    parameters = p.policy.clone().requires_grad_()
    direct = dataclasses.replace(samples, leaf=p.table(parameters)[samples.states])
    (expected,) = torch.autograd.grad((samples.probabilities * reinforce(direct)).sum(), parameters)
    torch.testing.assert_close(estimate(samples, reinforce).mean, expected, atol=1e-12, rtol=0)


def test_batches_one_at_a_time_give_what_all_in_one_call_give():
    samples = every_batch(problem(num_prompts=1), group_size=2)
    one_call, many = (estimate(samples, reinforce, stacked=stacked) for stacked in (True, False))
    torch.testing.assert_close(one_call.mean, many.mean, atol=1e-12, rtol=0)
    assert one_call.variance == pytest.approx(many.variance, abs=1e-12)


def test_a_single_batch_is_what_a_trainer_would_have():
    samples = every_batch(problem(), group_size=2)
    one = samples.single(100)
    assert one.num_rows == 4
    assert one.groups.tolist() == [0, 0, 1, 1]
    assert one.row_index[one.is_last].tolist() == [0, 1, 2, 3]
    assert len(one.logprobs) == int(one.lengths.sum())
    rows = samples.completions[400:404]
    assert one.rewards.tolist() == samples.problem.rewards[rows].tolist()
    here = samples.batch_of_token == 100
    assert one.tokens.tolist() == samples.tokens[here].tolist()
    torch.testing.assert_close(one.logprobs, samples.logprobs[here])
    prompts = samples.problem.tree.prompts[rows]
    assert prompts.tolist() == [0, 0, 1, 1]


def test_agreement_tells_size_and_direction_apart():
    target = torch.tensor([3.0, 4.0], dtype=torch.float64)
    samples = every_batch(problem(), group_size=1)
    found = estimate(samples, reinforce)
    half = agreement(dataclasses.replace(found, mean=target / 2, variance=25.0), target)
    assert (half.bias, half.scale, half.cosine, half.noise) == pytest.approx((0.5, 0.5, 1.0, 1.0), abs=1e-12)
    turned = agreement(dataclasses.replace(found, mean=torch.tensor([-4.0, 3.0]).double()), target)
    assert (turned.bias, turned.scale, turned.cosine) == pytest.approx((math.sqrt(2), 0.0, 0.0), abs=1e-12)
    nothing = agreement(dataclasses.replace(found, mean=torch.zeros(2).double()), target)
    assert math.isnan(nothing.cosine)
