"""The enumeration itself, against numbers worked out by hand and against a second way to compute them."""

import dataclasses
import functools
import math

import pytest
import torch

from prefrl.losses.advantage.estimators import rloo
from prefrl.losses.advantage.tokens import turn_advantages
from prefrl.losses.per_token import row_sums
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.truncation import Truncation
from prefrl.options.policy_gradient import AdvantageParams
from prefrl.scripts.oracle.exact import (
    END,
    OBJECTIVES,
    Tree,
    agreement,
    estimate,
    every_batch,
    exact_gradient,
    make_problem,
)
from prefrl.scripts.oracle.recipe import (
    Recipe,
    centered_turns,
    credit_of_turns,
    reinforce_loss,
    row_advantages,
    sampling_weights,
)
from prefrl.scripts.oracle.tables import params_of


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


def test_a_part_is_the_batches_that_a_trainer_would_have():
    samples = every_batch(problem(), group_size=2)
    one = samples.part(100, 101)
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
    rest = samples.part(samples.num_batches - 2, samples.num_batches + 50)
    assert rest.num_batches == 2
    assert rest.completions.tolist() == samples.completions[-8:].tolist()


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


EPISODE = row_advantages(lambda scored: rloo(scored, AdvantageParams()))
CENTERED = credit_of_turns(centered_turns)
GROUP_SIZES = pytest.mark.parametrize("group_size", [2, 3])


def by_return(discount=1.0):
    return credit_of_turns(functools.partial(turn_advantages, discount=discount))


def two_turns(**changes):
    return make_problem(**({"num_prompts": 1, "num_tokens": 3, "length": 2, "num_features": 5, "seed": 3} | changes))


def measured(p, advantages, group_size):
    found = estimate(every_batch(p, group_size=group_size), Recipe(reinforce_loss, advantages))
    return agreement(found, -exact_gradient(p, "reward"))


def test_turns_are_paid_for_the_rise_of_the_critics_value_and_rows_for_all_of_it():
    p = two_turns(num_tokens=2)
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
        assert measured(two_turns(**sizes), advantages, group_size).bias < 1e-10


@GROUP_SIZES
def test_returns_have_less_noise_than_whole_episodes(group_size):
    noise = [measured(two_turns(), advantages, group_size).noise for advantages in (by_return(), EPISODE)]
    assert noise[0] < 0.95 * noise[1]


@GROUP_SIZES
def test_rewards_centered_at_each_turn_are_biased_only_if_the_policy_decides_when_to_stop(group_size):
    p = two_turns(num_features=None)
    assert measured(p, CENTERED, group_size).bias > 0.1
    policy = p.policy.view(-1, 3).clone()
    policy[0, END] = -100.0  # nobody stops in the first turn
    p = p.replace(policy=policy.flatten(), sampler=policy.flatten(), old=policy.flatten())
    assert measured(p, CENTERED, group_size).bias < 1e-10


def test_a_discount_is_biased():
    assert measured(two_turns(), by_return(discount=0.5), 2).bias > 0.1


CUTS = {"top_k": Truncation(top_k=2), "top_p": Truncation(top_p=0.65), "min_p": Truncation(min_p=0.7)}
ROWS = sampling_weights("sequence_truncate")


def truncated_problem(cuts, *, exact):
    """Samples of the truncated policy; the losses score it, or the whole softmax."""
    p = make_problem(num_prompts=1, num_tokens=3, length=2, num_features=5, seed=3)
    return p.replace(sampled=cuts, scored=cuts if exact else Truncation())


def expected(p, recipe):
    return estimate(every_batch(p, group_size=1), recipe).mean


def bias(p, recipe):
    return agreement(estimate(every_batch(p, group_size=1), recipe), reward_loss(p)).bias


def is_equal(found, target):
    torch.testing.assert_close(found, target, atol=1e-10, rtol=0)


def reward_loss(p):
    return -exact_gradient(p, "reward")


def kept(p, parameters):
    """[S, V] bool: the tokens of a truncated policy, token by token from their definition."""
    table = p.table(parameters).detach()
    is_kept = torch.zeros_like(table, dtype=torch.bool)
    for state, row in enumerate(table.exp()):
        mass = 0.0
        for rank, token in enumerate(row.argsort(descending=True).tolist()):
            is_likely = row[token] >= p.sampled.min_p * row.max()
            if is_likely and mass < p.sampled.top_p and (p.sampled.top_k == 0 or rank < p.sampled.top_k):
                is_kept[state, token] = True
            mass += float(row[token])
    return is_kept


def log_kept_mass(p, parameters):
    """[S] log Z: the probability that the whole softmax gives to the kept tokens; gradient flows."""
    return (p.table(parameters).exp() * kept(p, parameters)).sum(1).log()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_the_objective_is_that_of_the_kept_tokens_renormalized(cuts):
    p, tree = truncated_problem(cuts, exact=True), truncated_problem(cuts, exact=True).tree
    parameters = p.policy.clone().requires_grad_()
    is_kept = kept(p, parameters)
    assert not is_kept.all()
    table = p.table(parameters) - log_kept_mass(p, parameters)[:, None]
    of_token = torch.where(is_kept, table.exp(), 0.0)[tree.states, tree.tokens]
    probabilities = torch.stack([of_token[tree.row_index == row].prod() for row in range(tree.num_completions)])
    is_equal(probabilities.sum(), torch.tensor(1.0, dtype=torch.float64))
    (gradient,) = torch.autograd.grad((probabilities * p.rewards).sum(), parameters)
    is_equal(reward_loss(p), -gradient)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize(
    ("name", "level"), [("reinforce", "token"), ("grpo", "token"), ("cispo", "token"), ("grpo", "sequence_sum")]
)
def test_exact_log_probs_are_unbiased_on_policy_and_those_of_the_softmax_are_not(cuts, name, level):
    def loss(tokens):
        return POLICY_LOSSES[name].function(tokens, params_of(name, POLICY_LOSSES[name].params))

    reduction = "sequence_mean" if level == "sequence_sum" else "sequence_sum"
    recipe = Recipe(loss, level=level, reduction=reduction)
    is_equal(expected(truncated_problem(cuts, exact=True), recipe), reward_loss(truncated_problem(cuts, exact=True)))
    assert bias(truncated_problem(cuts, exact=False), recipe) > 0.1


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_the_softmax_adds_the_gradient_of_the_kept_mass(cuts):
    """log softmax = log pi + log Z, so the gradient has E[R sum over tokens of grad log Z], too."""
    p = truncated_problem(cuts, exact=False)
    tree, parameters = p.tree, p.policy.clone().requires_grad_()
    is_token = torch.ones_like(tree.tokens, dtype=torch.bool)
    of_rows = row_sums(log_kept_mass(p, parameters)[tree.states], is_token, tree.row_index, tree.num_completions)
    weights = p.completion_logprobs(p.policy).exp().detach() * p.rewards
    (more,) = torch.autograd.grad((weights * of_rows).sum(), parameters)
    is_equal(expected(p, Recipe(reinforce_loss)), reward_loss(p) - more)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_on_policy_ratios_of_rows_are_1_if_exact_and_the_kept_mass_if_of_the_softmax(cuts):
    for exact in (True, False):
        p = truncated_problem(cuts, exact=exact)
        samples = every_batch(p, group_size=1)
        is_sampled = samples.probabilities[samples.row_index] > 0
        assert 0 < is_sampled.sum() < len(is_sampled)
        log_mass = torch.zeros_like(p.critic) if exact else log_kept_mass(p, p.policy)
        of_rows = row_sums(log_mass[samples.states], samples.trainable, samples.row_index, samples.num_rows)
        is_equal(ROWS(samples).log()[is_sampled], of_rows[samples.row_index][is_sampled])
        assert (bias(p, Recipe(reinforce_loss, weights=ROWS)) < 1e-10) == exact


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_ratios_of_rows_are_unbiased_off_policy_where_both_policies_keep_the_same_tokens(cuts):
    weighted = Recipe(reinforce_loss, weights=ROWS)
    near, far = (truncated_problem(cuts, exact=True).moved(sampler=step) for step in (0.01, 1.0))
    assert kept(near, near.policy).equal(kept(near, near.sampler))
    is_equal(expected(near, weighted), reward_loss(near))
    assert bias(near, Recipe(reinforce_loss)) > 1e-4
    assert not kept(far, far.policy).equal(kept(far, far.sampler))
    assert bias(far, weighted) > 0.05
