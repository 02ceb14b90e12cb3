"""What the oracle says of truncated sampling: the true gradient is that of the truncated policy's expected reward."""

import pytest
import torch

from prefrl.losses.per_token import row_sums
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.truncation import Truncation
from prefrl.scripts.oracle.exact import agreement, estimate, every_batch, exact_gradient, make_problem
from prefrl.scripts.oracle.recipe import Recipe, reinforce_loss, sampling_weights
from prefrl.scripts.oracle.tables import params_of

CUTS = {"top_k": Truncation(top_k=2), "top_p": Truncation(top_p=0.65), "min_p": Truncation(min_p=0.7)}
ROWS = sampling_weights("sequence_truncate")


def problem(cuts, *, exact):
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
    p, tree = problem(cuts, exact=True), problem(cuts, exact=True).tree
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
    is_equal(expected(problem(cuts, exact=True), recipe), reward_loss(problem(cuts, exact=True)))
    assert bias(problem(cuts, exact=False), recipe) > 0.1


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_the_softmax_adds_the_gradient_of_the_kept_mass(cuts):
    """log softmax = log pi + log Z, so the gradient has E[R sum over tokens of grad log Z], too."""
    p = problem(cuts, exact=False)
    tree, parameters = p.tree, p.policy.clone().requires_grad_()
    is_token = torch.ones_like(tree.tokens, dtype=torch.bool)
    of_rows = row_sums(log_kept_mass(p, parameters)[tree.states], is_token, tree.row_index, tree.num_completions)
    weights = p.completion_logprobs(p.policy).exp().detach() * p.rewards
    (more,) = torch.autograd.grad((weights * of_rows).sum(), parameters)
    is_equal(expected(p, Recipe(reinforce_loss)), reward_loss(p) - more)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_on_policy_ratios_of_rows_are_1_if_exact_and_the_kept_mass_if_of_the_softmax(cuts):
    for exact in (True, False):
        p = problem(cuts, exact=exact)
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
    near, far = (problem(cuts, exact=True).moved(sampler=step) for step in (0.01, 1.0))
    assert kept(near, near.policy).equal(kept(near, near.sampler))
    is_equal(expected(near, weighted), reward_loss(near))
    assert bias(near, Recipe(reinforce_loss)) > 1e-4
    assert not kept(far, far.policy).equal(kept(far, far.sampler))
    assert bias(far, weighted) > 0.05
