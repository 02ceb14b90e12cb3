"""The claims about what losses, advantages, KL estimates and corrections do on average hold to 1e-10 in float64."""

import functools
import itertools

import pytest
import torch

from prefrl.losses.advantage import ADVANTAGES
from prefrl.losses.kl import (
    KL_ESTIMATORS,
    ReferenceLogits,
    completion_kl,
    importance_corrected,
)
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.policy.off_policy import OFF_POLICY_CORRECTIONS
from prefrl.scripts.oracle.distillation import FORMS, SAMPLERS, full, later_tokens, log_ratio, problems, sequence
from prefrl.scripts.oracle.exact import OBJECTIVES, agreement, estimate, every_batch, exact_gradient, make_problem
from prefrl.scripts.oracle.late import late_forms, problem_of_versions
from prefrl.scripts.oracle.recipe import (
    Recipe,
    reinforce_loss,
    row_advantages,
    row_total,
    sampling_weights,
    selection,
    silent,
    token_advantages,
    two_prompts,
    whiten,
)
from prefrl.scripts.oracle.tables import params_of

SIZES = {"num_prompts": 1, "num_tokens": 3, "length": 2, "num_features": 5, "seed": 3}
NO_CLIP = {"epsilon": 1.0, "epsilon_high": 1e6}
OFF_POLICY = [0.2, 1.0]
BOTH_POLICIES = pytest.mark.parametrize("num_features", [None, 5], ids=["tabular", "shared"])


def problem(**changes):
    return make_problem(**(SIZES | changes))


def bind(name, row, **changes):
    params = params_of(name, row.params, **changes)
    return lambda values: row.function(values, params)


def policy_loss(name, **changes):
    return bind(name, POLICY_LOSSES[name], **changes)


def advantages(name, *, group_changes=None, **options):
    row = ADVANTAGES[name]
    function = bind(name, row, **(group_changes or {}))
    return (row_advantages if row.level == "row" else token_advantages)(function, **options)


def expected(p, recipe, *, group_size=2, stacked=True):
    return estimate(every_batch(p, group_size=group_size), recipe, stacked=stacked).mean


def bias(p, recipe, target, *, group_size=2, stacked=True):
    return agreement(estimate(every_batch(p, group_size=group_size), recipe, stacked=stacked), target).bias


def is_equal(found, target):
    torch.testing.assert_close(found, target, atol=1e-10, rtol=0)


def reward_loss(p):
    """The gradient of what is minimized, -E[R]."""
    return -exact_gradient(p, "reward")


# Policy losses.


def reduction_of(name, level):
    """That of a sum over tokens: a ratio of the whole row stands on each of its tokens, and counts once."""
    counts_once = level == "sequence_sum" and name not in ("cispo", "aipo")
    return "sequence_mean" if counts_once else "sequence_sum"


ON_POLICY = [(n, level) for n, row in POLICY_LOSSES.items() if row.selection is None for level in row.levels]


@BOTH_POLICIES
@pytest.mark.parametrize(("name", "level"), ON_POLICY)
def test_every_loss_without_a_selection_is_unbiased_on_policy(name, level, num_features):
    p = problem(num_features=num_features)
    recipe = Recipe(policy_loss(name), level=level, reduction=reduction_of(name, level))
    for group_size in (1, 2):
        is_equal(expected(p, recipe, group_size=group_size), reward_loss(p))


def test_longer_completions_and_more_tokens_change_nothing():
    for sizes in ({"num_tokens": 4, "length": 3}, {"num_tokens": 2, "length": 4}, {"num_tokens": 5, "length": 2}):
        p = problem(**sizes, num_prompts=2, num_features=6)
        is_equal(expected(p, Recipe(policy_loss("grpo")), group_size=1), reward_loss(p))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, NO_CLIP) for name in ("grpo", "cispo")),
        ("aipo", {"rho": 1e6}),
        ("kl_cov", {"coef": 0.0}),
    ],
)
@pytest.mark.parametrize("step", OFF_POLICY)
def test_ratios_of_tokens_without_bounds_are_biased_off_policy_and_those_of_rows_are_not(name, changes, step):
    p = problem().moved(sampler=step, old=step)
    row = POLICY_LOSSES[name]
    select = None if row.selection is None else (lambda tokens: torch.zeros_like(tokens.trainable))
    by_token = Recipe(policy_loss(name, **changes), selected=select)
    assert bias(p, by_token, reward_loss(p)) > 0.02
    if "sequence_sum" in row.levels:
        by_row = Recipe(
            policy_loss(name, **changes), level="sequence_sum", reduction=reduction_of(name, "sequence_sum")
        )
        is_equal(expected(p, by_row), reward_loss(p))


@pytest.mark.parametrize(("name", "level"), ON_POLICY)
def test_every_loss_as_it_is_set_is_biased_off_policy(name, level):
    p = problem().moved(sampler=1.0, old=1.0)
    recipe = Recipe(policy_loss(name), level=level, reduction=reduction_of(name, level))
    assert bias(p, recipe, reward_loss(p)) > 0.05


def test_a_token_alone_has_the_ratio_of_its_row():
    p = problem(length=1).moved(sampler=1.0, old=1.0)
    for level in ("token", "sequence", "sequence_token"):
        is_equal(expected(p, Recipe(policy_loss("grpo", **NO_CLIP), level=level)), reward_loss(p))


def test_gspo_and_its_token_form_have_one_gradient_where_rows_have_one_advantage():
    p = problem().moved(sampler=0.5, old=0.5)
    forms = [Recipe(policy_loss("grpo"), level=level) for level in ("sequence", "sequence_token")]
    is_equal(*(expected(p, form) for form in forms))


def test_advantages_of_tokens_need_a_ratio_whose_gradient_reaches_its_own_token_alone():
    """The gradient of a row's mean reaches all tokens from each: they get the mean of the row's advantages."""
    p = problem()
    for name, level in (("grpo", "token"), ("grpo", "sequence_token")):
        is_equal(expected(p, Recipe(policy_loss(name), advantages("gae"), level=level)), reward_loss(p))
    for name, level in (("grpo", "sequence"), ("sapo", "sequence"), ("gmpo", "token")):
        assert bias(p, Recipe(policy_loss(name), advantages("gae"), level=level), reward_loss(p)) > 0.02


def test_kl_cov_is_unbiased_on_policy_and_clip_cov_is_not():
    p = problem()
    for name, limit in (("kl_cov", (0, 1e-10)), ("clip_cov", (0.1, 1))):
        row = POLICY_LOSSES[name]
        select = selection(row, params_of(name, row.params))
        found = bias(p, Recipe(policy_loss(name), selected=select), reward_loss(p), stacked=False)
        assert limit[0] <= found < limit[1]


# Reductions.


def test_a_constant_divides_the_gradient_and_means_over_tokens_bend_it():
    p = problem(num_features=None)
    is_equal(5 * expected(p, Recipe(reinforce_loss, reduction="constant", constant=5.0)), reward_loss(p))
    for reduction in ("token", "sequence_mean"):
        found = agreement(
            estimate(every_batch(p, group_size=2), Recipe(reinforce_loss, reduction=reduction)), reward_loss(p)
        )
        assert found.cosine < 0.9995
    same_length = problem(length=1)
    for reduction in ("token", "sequence_mean"):
        is_equal(expected(same_length, Recipe(reinforce_loss, reduction=reduction)), reward_loss(same_length))


@pytest.mark.parametrize("length", [2, 3])
def test_a_mean_over_the_tokens_of_a_row_weighs_each_row_by_its_length(length):
    """The gradient of E[R / length] with the length held, which is that of another reward."""
    p = problem(length=length)
    shorter = p.replace(rewards=p.rewards / p.tree.lengths)
    is_equal(expected(p, Recipe(reinforce_loss, reduction="sequence_mean")), reward_loss(shorter))


# Advantages.


@BOTH_POLICIES
@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("name", ["rloo", "remax", "gae", "reinforce_plus_plus"])
def test_these_advantages_are_unbiased(name, group_size, num_features):
    p = problem(num_features=num_features)
    is_equal(expected(p, Recipe(reinforce_loss, advantages(name)), group_size=group_size), reward_loss(p))


def test_rloo_of_two_prompts_is_unbiased():
    p = problem(num_prompts=2)
    is_equal(expected(p, Recipe(reinforce_loss, advantages("rloo"))), reward_loss(p))


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "changes"), [("grpo", {"scale_rewards": "none"}), ("reinforce_plus_plus_baseline", {})]
)
def test_the_groups_own_mean_gives_n_minus_1_over_n_of_the_gradient(name, changes, group_size):
    """The mean holds the row's own reward: R - mean = (n - 1) / n (R - mean of the others)."""
    p = problem()
    found = expected(p, Recipe(reinforce_loss, advantages(name, group_changes=changes)), group_size=group_size)
    is_equal(found, (group_size - 1) / group_size * reward_loss(p))


def test_a_leave_one_out_mean_is_the_groups_mean_times_n_over_n_minus_1():
    samples = every_batch(problem(), group_size=3)
    centered = advantages("grpo", group_changes={"scale_rewards": "none"})(samples)
    is_equal(advantages("rloo")(samples), 3 / 2 * centered)


@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("grpo", {"scale_rewards": "group"}, 0.01),
        ("grpo", {"scale_rewards": "batch"}, 0.01),
        ("opo", {}, 0.01),
        ("gpg", {}, 1e-4),
        ("grpo_passk", {"scale_rewards": "none"}, 0.01),
        ("maxrl", {}, 0.01),
        ("optimal_token_baseline", {}, 0.01),
    ],
)
def test_these_advantages_are_biased_also_up_to_scale(name, changes, least):
    p = problem(num_prompts=2, num_tokens=2, length=3, num_features=None)
    p = p.replace(rewards=p.rewards.abs() + 0.1)
    samples = every_batch(p, group_size=2)
    recipe = Recipe(reinforce_loss, advantages(name, group_changes=changes))
    # Some take statistics of the whole batch.
    found = agreement(estimate(samples, recipe, stacked=False), reward_loss(p))
    assert 1 - found.cosine**2 > least**2


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"gpg"}))
def test_groups_learn_nothing_from_each_other_so_all_batches_go_in_one_call(name):
    samples = every_batch(two_prompts(), group_size=2)
    recipe = Recipe(reinforce_loss, advantages(name))
    is_equal(*(estimate(samples, recipe, stacked=stacked).mean for stacked in (True, False)))


@pytest.mark.parametrize(
    ("name", "changes"), [("opo", {}), ("grpo", {"scale_rewards": "none"}), ("optimal_token_baseline", {})]
)
def test_a_larger_group_has_less_of_its_own_reward_in_the_baseline(name, changes):
    p = problem()
    recipe = Recipe(reinforce_loss, advantages(name, group_changes=changes))
    small, large = (bias(p, recipe, reward_loss(p), group_size=group_size) for group_size in (2, 4))
    assert large < 0.8 * small


def test_whitening_bends_the_gradient():
    p = problem(num_prompts=2, num_tokens=2, length=3, num_features=None)
    recipe = Recipe(reinforce_loss, whiten(advantages("reinforce_plus_plus"), advantage_epsilon=1e-8))
    found = agreement(estimate(every_batch(p, group_size=2), recipe, stacked=False), reward_loss(p))
    assert found.cosine < 0.999


def test_gae_with_any_critic_is_unbiased_at_lambda_1_alone():
    p = problem()
    for lam in (0.0, 0.5, 1.0):
        found = bias(p, Recipe(reinforce_loss, advantages("gae", group_changes={"lam": lam})), reward_loss(p))
        assert found < 1e-10 if lam == 1 else found > 0.1


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_with_the_true_critic_is_unbiased_at_any_lambda(lam):
    p = problem()
    p = p.replace(critic=p.exact_critic)
    is_equal(expected(p, Recipe(reinforce_loss, advantages("gae", group_changes={"lam": lam}))), reward_loss(p))


def test_the_true_critic_lowers_the_noise_and_a_discount_bends_the_gradient():
    p = problem()
    plain, true = (
        estimate(every_batch(q, group_size=1), Recipe(reinforce_loss, advantages("gae")))
        for q in (p.replace(critic=torch.zeros_like(p.critic)), p.replace(critic=p.exact_critic))
    )
    assert true.variance < plain.variance
    discounted = Recipe(reinforce_loss, advantages("reinforce_plus_plus", group_changes={"gamma": 0.5}))
    assert bias(p, discounted, reward_loss(p)) > 0.01


def test_a_baseline_lowers_the_noise_of_the_reward_itself():
    p = problem()
    p = p.replace(rewards=p.rewards + 3)
    noise = [
        agreement(estimate(every_batch(p, group_size=2), recipe), reward_loss(p)).noise
        for recipe in (
            Recipe(reinforce_loss),
            Recipe(reinforce_loss, advantages("rloo")),
            Recipe(reinforce_loss, advantages("remax")),
        )
    ]
    assert max(noise[1:]) < noise[0] / 2


# Corrections for samples of another policy.


@pytest.mark.parametrize("step", OFF_POLICY)
@pytest.mark.parametrize("estimator", [None, "rloo", "remax", "gae"])
def test_ratios_of_rows_without_bounds_are_unbiased(step, estimator):
    p = problem().moved(sampler=step)
    made = {} if estimator is None else {"advantages": advantages(estimator)}
    for name in ("sequence_truncate", "sequence_mask"):
        is_equal(expected(p, Recipe(reinforce_loss, **made, weights=sampling_weights(name))), reward_loss(p))


@pytest.mark.parametrize("name", sorted(set(OFF_POLICY_CORRECTIONS) - {"sequence_truncate", "sequence_mask"}))
def test_other_ratios_are_biased_but_less_than_none(name):
    p = problem().moved(sampler=1.0)
    corrected = bias(p, Recipe(reinforce_loss, weights=sampling_weights(name)), reward_loss(p))
    assert 0.02 < corrected < bias(p, Recipe(reinforce_loss), reward_loss(p))


def test_bounds_trade_noise_for_bias():
    p = problem().moved(sampler=1.0)
    samples = every_batch(p, group_size=1)
    free, bounded = (
        agreement(estimate(samples, Recipe(reinforce_loss, weights=sampling_weights("sequence_truncate", high=high))),
                  reward_loss(p))
        for high in (None, 1.2)
    )  # fmt: skip
    assert free.bias < 1e-10
    assert bounded.bias > 0.05
    assert bounded.noise < free.noise


def test_every_correction_is_exact_on_policy():
    p = problem()
    for name in OFF_POLICY_CORRECTIONS:
        is_equal(
            expected(p, Recipe(reinforce_loss, weights=sampling_weights(name, low=0.5, high=2.0))), reward_loss(p)
        )


# KL.


def kl_value(name):
    def value(samples):
        return KL_ESTIMATORS[name].function(samples.logprobs, samples.logprobs_of(samples.problem.reference))

    return value


def kl_corrected(name):
    def value(samples):
        reference = samples.logprobs_of(samples.problem.reference)
        return importance_corrected(samples.logprobs, reference, log_ratio(samples), kl_estimator=name)

    return value


def as_loss(value):
    return Recipe(silent, term=value)


def in_reward(value):
    total = row_total(value)
    return Recipe(reinforce_loss, lambda samples: -total(samples))


# What the gradient of a KL estimate as a loss is that of, on-policy.
AS_LOSS = {
    "k1": None,
    "k2": "token_kl",
    "k3": "reverse_token_kl",
    "abs": "token_variation",
    "k1+": "token_kl",
    "k3+": "token_kl",
    "abs+": "token_kl",
}


@BOTH_POLICIES
@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_as_a_loss_each_kl_estimate_has_the_gradient_of_its_own_divergence(name, num_features):
    p = problem(num_features=num_features)
    objective = AS_LOSS[name]
    target = exact_gradient(p, objective) if objective else torch.zeros_like(p.policy)
    is_equal(expected(p, as_loss(kl_value(name))), target)
    is_right = bias(p, as_loss(kl_value(name)), exact_gradient(p, "token_kl")) < 1e-10
    assert is_right == KL_ESTIMATORS[name].unbiased_gradient


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_the_value_of_a_kl_estimate_has_the_mean_that_its_row_promises(name):
    p = problem()
    samples = every_batch(p, group_size=1)
    sums = torch.zeros(samples.num_rows, dtype=torch.float64).index_add(
        0, samples.row_index, kl_value(name)(samples).detach()
    )
    mean = float(samples.probabilities @ sums)
    exact = float(OBJECTIVES["kl"](p, p.policy))
    assert (abs(mean - exact) < 1e-10) == KL_ESTIMATORS[name].unbiased_value


def test_no_estimate_as_a_loss_has_the_gradient_of_whole_completions():
    """A token's effect on how later tokens diverge is missing; the divergence of k2 and full is of given prefixes."""
    p = problem()
    difference = exact_gradient(p, "kl") - exact_gradient(p, "token_kl")
    assert float(difference.norm()) > 0.05 * float(exact_gradient(p, "kl").norm())
    for value in (kl_value("k2"), full):
        is_equal(expected(p, as_loss(value)) + difference, exact_gradient(p, "kl"))
    one_token = problem(length=1)
    is_equal(expected(one_token, as_loss(kl_value("k2"))), exact_gradient(one_token, "kl"))


@BOTH_POLICIES
@pytest.mark.parametrize("name", ["k1", "k1+"])
def test_k1_in_the_reward_has_the_gradient_of_whole_completions(name, num_features):
    p = problem(num_features=num_features)
    is_equal(expected(p, in_reward(kl_value(name))), exact_gradient(p, "kl"))


def test_k3_in_the_reward_lacks_the_gradient_that_it_has_as_a_loss():
    """grad E[k3] = E[k3 grad log pi] + E[grad k3]: the mean is right, and the first part alone is not its gradient."""
    p = problem()
    found = expected(p, in_reward(kl_value("k3")))
    is_equal(found + exact_gradient(p, "reverse_token_kl"), exact_gradient(p, "kl"))
    assert bias(p, in_reward(kl_value("k3")), exact_gradient(p, "kl")) > 0.5


@pytest.mark.parametrize("estimator", ["rloo", "gae", "reinforce_plus_plus"])
def test_rewards_minus_k1_train_the_reward_minus_the_kl(estimator):
    """J = E[R] - 0.3 KL, by row totals or by tokens to go; only the sum of a row's penalties, or its tail, counts."""
    p = problem()

    def penalty(samples):
        return 0.3 * kl_value("k1")(samples)

    recipe = Recipe(reinforce_loss, advantages(estimator, penalty=penalty))
    is_equal(expected(p, recipe), reward_loss(p) + 0.3 * exact_gradient(p, "kl"))


def test_a_loss_term_adds_to_the_policy_gradient():
    p = problem()
    recipe = Recipe(policy_loss("grpo"), advantages("rloo"), term=lambda samples: 0.3 * kl_value("k2")(samples))
    is_equal(expected(p, recipe), reward_loss(p) + 0.3 * exact_gradient(p, "token_kl"))


@pytest.mark.parametrize("step", [0.0, *OFF_POLICY])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+", "abs+"])
def test_weighted_kl_estimates_have_the_right_gradient_for_given_prefixes_from_any_policy(name, step):
    p = problem().moved(sampler=step)
    is_equal(expected(p, as_loss(kl_corrected(name))), exact_gradient(p, "token_kl"))


@pytest.mark.parametrize("step", OFF_POLICY)
def test_unweighted_kl_estimates_are_biased_off_policy_and_the_full_divergence_is_not(step):
    p = problem().moved(sampler=step)
    for name in ("k2", "k3+"):
        assert bias(p, as_loss(kl_value(name)), exact_gradient(p, "token_kl")) > 0.02
    is_equal(expected(p, as_loss(full)), exact_gradient(p, "token_kl"))


@BOTH_POLICIES
@pytest.mark.parametrize("step", [0.0, *OFF_POLICY])
def test_sequence_kl_has_the_gradient_of_whole_completions_from_any_policy(step, num_features):
    p = problem(num_features=num_features).moved(sampler=step)
    is_equal(expected(p, as_loss(sequence)), exact_gradient(p, "kl"))


def test_sequence_kl_with_a_cap_is_biased_where_weights_reach_it():
    p = problem().moved(sampler=1.0)
    capped = bias(p, as_loss(functools.partial(sequence, cap=1.5)), exact_gradient(p, "kl"))
    assert 0.01 < capped < 1
    is_equal(expected(problem(), as_loss(functools.partial(sequence, cap=1.0))), exact_gradient(problem(), "kl"))


def test_sequence_kl_of_longer_rows_is_exact_too():
    p = problem(num_tokens=3, length=4).moved(sampler=0.5)
    is_equal(expected(p, as_loss(sequence), group_size=1), exact_gradient(p, "kl"))


@BOTH_POLICIES
@pytest.mark.parametrize("step", [0.0, *OFF_POLICY])
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_completion_kl_has_the_gradient_of_whole_completions_from_any_policy(group_size, step, num_features):
    sizes = {"length": 3} if group_size == 1 else {"num_tokens": 2} if group_size == 3 else {}
    p = problem(num_features=num_features, **sizes).moved(sampler=step)
    is_equal(expected(p, as_loss(later_tokens), group_size=group_size), exact_gradient(p, "kl"))
    assert bias(p, as_loss(full), exact_gradient(p, "kl"), group_size=1) > 1e-5


# The forms of distillation that have the gradient of their divergence of completions, by whose samples.
EXACT = {
    "`later_tokens: true`": SAMPLERS.keys(),
    "`later_tokens: true`, no baseline": SAMPLERS.keys(),
    "`sequence`": SAMPLERS.keys(),
    "own token in full, later ones sampled": {"student"},
    "`k1` in the reward": SAMPLERS.keys(),
    "`beta: 0`": {"teacher"},
    "`beta: 0`, top 4 of 4": {"teacher"},
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms_of_distillation_are_exact_for_the_samples_that_the_docs_say_and_no_others(form):
    p = problems()[0]
    target, group_size = exact_gradient(p, form.objective), 2 if form.reads_group else 1
    found = {name: bias(move(p), form.recipe, target, group_size=group_size) for name, move in SAMPLERS.items()}
    assert {name for name, value in found.items() if value < 1e-10} == set(EXACT.get(form.name, ()))
    assert not [value for value in found.values() if 1e-10 <= value < 0.05]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_scores_of_the_chunked_head_have_the_gradients_of_their_tokens_and_completions(step, temperature):
    """Entropy and divergences, as trainers compute them: the logits are hidden states of an identity head.

    Logits are the log-probs times the temperature, so the policy at this temperature is that of the problem.
    """
    p = problem().moved(sampler=step)
    head = Head(torch.eye(3, dtype=torch.float64))

    def scores(samples):
        teacher = samples.problem.table(samples.problem.reference)[samples.states]
        reference = ReferenceLogits(temperature * teacher, lambda hidden: hidden)
        return chunked_logprobs(
            temperature * samples.leaf,
            samples.tokens,
            head,
            temperature=temperature,
            want=("entropy", "entropy_gradient"),
            reference=reference,
            chunk_size=7,
        )

    def of_completions(samples):
        found, groups = scores(samples), samples.groups.tolist()
        ratio = found.logprobs - samples.sampling_logprobs
        return completion_kl(found.divergence, ratio, samples.trainable, samples.row_index, groups, longest=2)

    is_equal(expected(p, as_loss(of_completions)), exact_gradient(p, "kl"))
    is_equal(expected(p, as_loss(lambda samples: scores(samples).divergence)), exact_gradient(p, "token_kl"))
    is_equal(expected(p, as_loss(lambda samples: scores(samples).entropy)), exact_gradient(p, "token_entropy"))
    assert bias(p, as_loss(lambda samples: scores(samples).entropy), exact_gradient(p, "entropy")) > 0.1


def test_minus_the_log_prob_as_a_reward_has_the_gradient_of_the_entropy_of_completions():
    p = problem()
    total = row_total(lambda samples: -samples.logprobs)
    is_equal(expected(p, Recipe(reinforce_loss, total)), -exact_gradient(p, "entropy"))


# Everything with everything.

PLAIN_AT_ONE = [name for name, row in POLICY_LOSSES.items() if row.selection is None and name not in ("gmpo", "vespo")]
# One for each function: the others differ in their reduction, which is a part of its own here.
DISTINCT = list({POLICY_LOSSES[name].function: name for name in reversed(PLAIN_AT_ONE)}.values())
ESTIMATORS = {
    "rloo": ({}, True),
    "gae": ({}, True),
    "grpo": ({}, False),
    "opo": ({}, False),
}
REDUCTIONS = ("sequence_sum", "sequence_mean", "token")


@pytest.mark.parametrize("loss", DISTINCT)
def test_on_policy_a_combination_is_unbiased_exactly_if_all_its_parts_are(loss):
    p = problem()
    samples = every_batch(p, group_size=2)
    targets = {None: reward_loss(p)} | {name: reward_loss(p) + exact_gradient(p, name) for name in ("kl", "token_kl")}
    terms = {None: None, "token_kl": kl_value("k2"), "kl": sequence}
    weights = {None: None, "token": sampling_weights("token_mask", low=0.5, high=2.0)}
    for (name, (changes, is_fair)), reduction, objective, correction in itertools.product(
        ESTIMATORS.items(), REDUCTIONS, terms, weights
    ):
        recipe = Recipe(
            policy_loss(loss),
            advantages(name, group_changes=changes),
            reduction=reduction,
            weights=weights[correction],
            term=terms[objective],
        )
        found = agreement(estimate(samples, recipe), targets[objective]).bias
        is_unbiased = is_fair and reduction == "sequence_sum"
        assert found < 1e-10 if is_unbiased else found > 1e-3, (name, reduction, objective, correction)


# Groups that are late.

VERSIONS = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.2)]


@pytest.mark.parametrize("versions", VERSIONS)
def test_sequence_weights_are_exact_for_completions_of_several_versions(versions):
    """mu is the product over tokens of the version that sampled each."""
    for name in (
        "`wait`, `sequence` weights",
        "dropped by chance, the prompt is asked again",
        "`ready`, both batches",
    ):
        assert late_forms(*versions)[name].agreement(problem_of_versions(*versions)).bias < 1e-10, name


def test_weights_of_one_version_are_biased_for_completions_of_several():
    forms = late_forms(1.0, 0.2)
    for name in ("oldest", "newest"):
        form = forms[f"the same, as if the {name} version had sampled all tokens"]
        assert form.agreement(problem_of_versions(1.0, 0.2)).bias > 0.05
        assert form.agreement(problem_of_versions(0.0, 0.0)).bias > 0.05  # and not because the policy has moved


@pytest.mark.parametrize("versions", VERSIONS)
def test_dropping_by_length_is_biased_and_follows_the_policy_that_finishes_in_time(versions):
    p = problem_of_versions(*versions)
    form = late_forms(*versions)["dropped by length, the prompt is asked again (`drop`)"]
    assert form.agreement(p).bias > 0.5
    # On-policy, `rloo` of the groups that are kept is the gradient of the sum below, whose weights stay fixed.
    if versions == (0.0, 0.0):
        parameters = p.policy.clone().requires_grad_()
        logprobs = p.completion_logprobs(parameters)
        chances = logprobs.detach().exp().where(p.tree.lengths <= 2, 0.0)
        of_prompt = torch.zeros(2, dtype=torch.float64).index_add(0, p.tree.prompts, chances)
        chances = chances / of_prompt[p.tree.prompts]
        means = torch.zeros(2, dtype=torch.float64).index_add(0, p.tree.prompts, chances * p.rewards)
        surrogate = (chances * (p.rewards - means[p.tree.prompts]) * logprobs).sum() / 2
        (expected,) = torch.autograd.grad(surrogate, parameters)
        true = exact_gradient(p, "reward")
        found = form.agreement(p)
        assert found.scale == pytest.approx(float(expected @ true / (true @ true)), abs=1e-10)
        assert found.bias == pytest.approx(float((expected - true).norm() / true.norm()), abs=1e-10)


def test_what_finishes_first_is_biased_and_what_is_left_makes_up_for_it():
    p, forms = problem_of_versions(0.0, 0.0), late_forms(0.0, 0.0)
    first = forms["`ready`, the batch of the group that finishes first"].agreement(p)
    other = forms["`ready`, the batch of the other group"].agreement(p)
    assert first.bias > 0.1
    assert (first.scale + other.scale) / 2 == pytest.approx(1, abs=1e-10)
    assert first.bias == pytest.approx(other.bias, abs=1e-10)
