"""KL estimators: numbers by hand, what their table promises by summing over all tokens, and verl's numbers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from prefrl.losses.kl import (
    KL_ESTIMATORS,
    completion_kl,
    importance_corrected,
    k1,
    k2,
    k3,
    row_prefix_sums,
    sequence_kl,
)
from prefrl.options.policy import SequenceKLParams

LOG2 = math.log(2)
VERL = json.loads((Path(__file__).parents[2] / "golden" / "verl_kl_0_9_1.json").read_text(encoding="utf-8"))

# Distributions over 4 tokens, in float64; REF finds one token e^3 times as likely as the policy does.
LOGITS = torch.tensor([0.1, -0.4, 0.9, -2.0], dtype=torch.float64)
REF = torch.tensor([0.4, -0.9, 0.2, 1.0], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([-0.5, 0.3, 0.0, 0.8], dtype=torch.float64).log_softmax(0)


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf)[0]


def exact(direction="reverse"):
    """KL(pi || ref), or KL(ref || pi), and its gradient."""
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    divergence = (
        (log_pi.exp() * (log_pi - REF)).sum() if direction == "reverse" else (REF.exp() * (REF - log_pi)).sum()
    )
    return divergence.detach(), gradient(divergence, logits)


def expected(estimate, log_sampler):
    """The mean over samples of an estimate of [4] tokens, and the mean of its gradient."""
    logits = LOGITS.clone().requires_grad_()
    mean = (log_sampler.exp() * estimate(logits.log_softmax(0))).sum()
    return mean.detach(), gradient(mean, logits)


def on_policy(name):
    return expected(lambda log_pi: KL_ESTIMATORS[name].function(log_pi, REF), LOGITS.log_softmax(0))


def corrected(name):
    """With tokens of another policy."""
    return expected(
        lambda log_pi: importance_corrected(log_pi, REF, log_pi - SAMPLER, kl_estimator=name),
        SAMPLER,
    )


def is_equal(actual, wanted):
    return torch.allclose(actual, wanted, rtol=0, atol=1e-12)


# pi = 1/4, ref = 1/2: d = log pi - log ref = -log 2.
@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1", -LOG2, 1.0),
        ("abs", LOG2, -1.0),
        ("k2", LOG2**2 / 2, -LOG2),
        ("k3", 2 - LOG2 - 1, -1.0),
        ("k1+", -LOG2, -LOG2),
        ("abs+", LOG2, -LOG2),
        ("k3+", 2 - LOG2 - 1, -LOG2),
    ],
)
def test_hand_value_and_gradient(name, value, slope):
    logprobs = torch.tensor([math.log(0.25)], requires_grad=True)
    ref_logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
    estimate = KL_ESTIMATORS[name].function(logprobs, ref_logprobs)
    torch.testing.assert_close(estimate.detach(), torch.tensor([value]))
    estimate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([slope]))
    assert ref_logprobs.grad is None


@pytest.mark.parametrize("row", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS.keys())
def test_zero_where_policies_agree(row):
    logprobs = torch.tensor([0.2, 0.3, 0.5]).log().requires_grad_()
    assert row.function(logprobs, logprobs.detach()).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_value_and_gradient_are_unbiased_as_the_table_says_and_nowhere_else(name):
    row = KL_ESTIMATORS[name]
    value, slope = on_policy(name)
    exact_value, exact_slope = exact()
    assert is_equal(value, exact_value) == row.unbiased_value
    assert is_equal(slope, exact_slope) == row.unbiased_gradient


def test_gradients_of_estimators_that_are_biased_as_losses_are_those_of_other_quantities():
    assert is_equal(on_policy("k1")[1], torch.zeros(4, dtype=torch.float64))
    assert is_equal(on_policy("k3")[1], exact("forward")[1])
    logits = LOGITS.clone().requires_grad_()
    assert is_equal(on_policy("abs")[1], gradient((logits.softmax(0) - REF.exp()).abs().sum(), logits))


@pytest.mark.parametrize("name", ["k1+", "abs+", "k3+"])
def test_straight_through_has_the_value_of_its_name_and_the_gradient_of_k2(name):
    logprobs, ref_logprobs = LOGITS.log_softmax(0).requires_grad_(), REF
    estimate = KL_ESTIMATORS[name].function(logprobs, ref_logprobs)
    assert estimate.equal(KL_ESTIMATORS[name[:-1]].function(logprobs, ref_logprobs))
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    theirs = gradient((weights * k2(logprobs, ref_logprobs)).sum(), logprobs)
    assert gradient((weights * estimate).sum(), logprobs).equal(theirs)


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_importance_corrected_estimates_are_exact_for_tokens_of_another_policy(name):
    value, slope = corrected(name)
    exact_value, exact_slope = exact()
    assert is_equal(value, exact_value)
    assert is_equal(slope, exact_slope)
    # Without the correction neither is right.
    plain_value, plain_slope = expected(lambda log_pi: KL_ESTIMATORS[name].function(log_pi, REF), SAMPLER)
    assert (plain_value - exact_value).abs() > 0.05
    assert (plain_slope - exact_slope).norm() > 0.05


@pytest.mark.parametrize("name", ["k2", "abs+"])
def test_importance_corrected_k2_has_the_exact_gradient_for_tokens_of_another_policy(name):
    assert is_equal(corrected(name)[1], exact()[1])
    assert is_equal(corrected(name)[0], on_policy(name)[0])


def test_importance_corrected_abs_is_its_mean_under_the_policy_as_a_function_of_the_policy():
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    mean = (log_pi.exp() * (log_pi - REF).abs()).sum()
    value, slope = corrected("abs")
    assert is_equal(value, mean.detach())
    assert is_equal(slope, gradient(mean, logits))


def test_importance_corrected_k3_is_exact_on_policy_where_the_ratio_is_one():
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    mean = (
        log_pi.detach().exp() * importance_corrected(log_pi, REF, log_pi - log_pi.detach(), kl_estimator="k3")
    ).sum()
    assert is_equal(gradient(mean, logits), exact()[1])


def test_k3_keeps_its_digits_where_policies_are_close():
    # d^2 / 2 at d = 1e-4, where exp(d) - 1 - d in float32 has no correct digit.
    estimate = k3(torch.tensor([-1e-4]), torch.tensor([0.0]))
    torch.testing.assert_close(estimate, torch.tensor([5.0e-9]), rtol=2e-3, atol=0)


@pytest.mark.parametrize("difference", [5.0, 10.0, 19.999])
def test_k3_is_unaltered_where_samples_are(difference):
    logprobs = torch.tensor([-difference], dtype=torch.float64, requires_grad=True)
    estimate = k3(logprobs, torch.zeros(1, dtype=torch.float64))
    assert estimate.item() == pytest.approx(math.exp(difference) - 1 - difference, rel=1e-12)
    assert gradient(estimate.sum(), logprobs).item() == pytest.approx(1 - math.exp(difference), rel=1e-12)


@pytest.mark.parametrize("difference", [-3.0, -1e-3, 1e-3, 3.0])
def test_the_gradient_of_k3_has_its_digits_in_float32(difference):
    logprobs = torch.tensor([-difference], requires_grad=True)
    slope = gradient(k3(logprobs, torch.tensor([0.0])).sum(), logprobs)
    torch.testing.assert_close(slope, torch.tensor([-math.expm1(difference)]), rtol=2e-4, atol=0)


def test_k3_goes_on_as_its_tangent_where_the_exponential_would_overflow():
    logprobs = torch.tensor([-20.0, -21.0, -1000.0], dtype=torch.float64, requires_grad=True)
    estimate = k3(logprobs, torch.zeros(3, dtype=torch.float64))
    slope = math.exp(20) - 1
    at_20 = math.exp(20) - 21
    assert estimate.tolist() == pytest.approx([at_20, at_20 + slope, at_20 + 980 * slope], rel=1e-12)
    assert gradient(estimate[1:].sum(), logprobs).tolist() == pytest.approx([0.0, -slope, -slope], rel=1e-12)
    assert k3(torch.tensor([-1000.0]), torch.tensor([0.0])).isfinite().all()


def test_a_ratio_that_would_overflow_counts_as_e_to_the_20():
    log_ratio = torch.tensor([1000.0], requires_grad=True)
    estimate = importance_corrected(torch.tensor([-1.0]), torch.tensor([-2.0]), log_ratio, kl_estimator="k1")
    torch.testing.assert_close(estimate.detach(), torch.tensor([math.exp(20)]))
    assert gradient(estimate.sum(), log_ratio).tolist() == [0.0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_and_gradients_are_those_of_verl(name):
    logprobs = torch.tensor(VERL["logprobs"], dtype=torch.float64, requires_grad=True)
    estimate = KL_ESTIMATORS[name].function(logprobs, torch.tensor(VERL["ref_logprobs"], dtype=torch.float64))
    slope = gradient(estimate.sum(), logprobs)
    theirs = VERL["kl_penalty"][name]
    if name in ("k3", "k3+"):
        # verl cuts k3 off at 10, so at the fifth token, of d = 4 nats, it has no gradient: exp(4) - 5 here.
        assert theirs["value"][4] == 10.0
        assert estimate[4].item() == pytest.approx(math.exp(4) - 5, rel=1e-12)
        theirs["value"][4] = estimate[4].item()
    if name == "k3":
        assert theirs["gradient"][4] == 0.0
        theirs["gradient"][4] = slope[4].item()
    assert estimate.tolist() == pytest.approx(theirs["value"], rel=1e-12)
    assert slope.tolist() == pytest.approx(theirs["gradient"], rel=1e-12)


@pytest.mark.parametrize("row", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS.keys())
def test_shapes_that_would_broadcast_are_refused(row):
    with pytest.raises(ValueError, match=r"shapes differ: logprobs \(3,\), ref_logprobs \(1,\)"):
        row.function(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match=r"shapes differ"):
        importance_corrected(torch.zeros(3), torch.zeros(3), torch.zeros(1), kl_estimator="k1")


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"kl_estimator='k4': allowed are k1, abs, k2, k3, k1\+, abs\+, k3\+"):
        importance_corrected(torch.zeros(1), torch.zeros(1), torch.zeros(1), kl_estimator="k4")


@pytest.mark.parametrize("row", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS.keys())
def test_the_dtype_is_that_of_the_log_probs(row):
    for dtype in (torch.float32, torch.float64):
        assert row.function(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)).dtype == dtype


def test_k1_of_two_tokens():
    assert k1(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])).tolist() == [2.0, -1.0]


V, T = 3, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))
PREFIXES = [prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)]


def policy(seed):
    """[prefix, V] logits: the next token depends on everything before it."""
    return torch.randn(len(PREFIXES), V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


POLICY, REFERENCE, SAMPLER_OF_ROWS = policy(0), policy(1), policy(2)


def token_logprobs(logits):
    """[27 * 3]: all sequences as rows, end to end."""
    log_softmax = logits.log_softmax(1)
    return torch.stack(
        [log_softmax[PREFIXES.index(sequence[:t]), sequence[t]] for sequence in SEQUENCES for t in range(T)]
    )


def exact_sum():
    logits = POLICY.clone().requires_grad_()
    rows = token_logprobs(logits).view(-1, T).sum(1)
    divergence = (rows.exp() * (rows - token_logprobs(REFERENCE).view(-1, T).sum(1))).sum()
    return divergence.detach(), torch.autograd.grad(divergence, logits)[0]


def estimated(sampler, *, cap=None):
    """The mean over all rows of `sampler` of a row's sum, and the mean of its gradient."""
    logits = POLICY.clone().requires_grad_()
    logprobs, log_mu = token_logprobs(logits), token_logprobs(sampler)
    terms = sequence_kl(
        logprobs,
        token_logprobs(REFERENCE),
        logprobs - log_mu,
        torch.ones(len(log_mu), dtype=torch.bool),
        torch.arange(len(SEQUENCES)).repeat_interleave(T),
        len(SEQUENCES),
        SequenceKLParams(weight_cap=cap),
    )
    mean = (log_mu.view(-1, T).sum(1).exp() * terms.view(-1, T).sum(1)).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sampler", [SAMPLER_OF_ROWS, POLICY], ids=["another policy", "the policy itself"])
def test_value_and_gradient_are_those_of_all_sequences(sampler):
    value, gradient = estimated(sampler)
    exact_value, exact_gradient = exact_sum()
    assert exact_value > 0.5
    assert_equal(value, exact_value)
    assert_equal(gradient, exact_gradient)


def test_a_cap_that_no_weight_reaches_changes_nothing():
    for ours, theirs in zip(estimated(SAMPLER_OF_ROWS, cap=1e6), exact_sum(), strict=True):
        assert_equal(ours, theirs)


def test_a_cap_on_samples_of_the_policy_itself_changes_nothing():
    for ours, theirs in zip(estimated(POLICY, cap=1.0), exact_sum(), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("cap", [1.0, 1.5, 3.0])
def test_the_bias_of_a_cap_is_within_its_bound(cap):
    value, exact_value = estimated(SAMPLER_OF_ROWS, cap=cap)[0], exact_sum()[0]
    log_pi, log_mu, log_ref = token_logprobs(POLICY), token_logprobs(SAMPLER_OF_ROWS), token_logprobs(REFERENCE)
    log_weights = (log_pi - log_mu).view(-1, T).cumsum(1)
    cut = (1 - cap * (-log_weights).exp()).clamp(min=0)
    bound = (log_pi.view(-1, T).sum(1).exp()[:, None] * (log_pi - log_ref).abs().view(-1, T) * cut).sum()
    assert 0.01 < (value - exact_value).abs() <= bound


def tensors(*rows):
    """[N] float64 leaves of some rows, and the row of each token."""
    lengths = torch.tensor([len(row) for row in rows])
    flat = torch.tensor([number for row in rows for number in row], dtype=torch.float64)
    return flat.requires_grad_(), torch.arange(len(rows)).repeat_interleave(lengths)


def call(differences, log_ratio, row_index, *, trainable=None, cap=None):
    return sequence_kl(
        differences,
        torch.zeros_like(differences),
        log_ratio,
        torch.ones(len(row_index), dtype=torch.bool) if trainable is None else torch.tensor(trainable),
        row_index,
        int(row_index[-1]) + 1,
        SequenceKLParams(weight_cap=cap),
    )


def test_hand_numbers_of_two_rows():
    # Weights 2, 2 * 3 and, in the second row, 1/2: terms 2 * 0.5, 6 * 1.5 and 0.5 * 4.
    differences, _ = tensors([0.5, 1.5], [4.0])
    log_ratio, row_index = tensors([math.log(2), math.log(3)], [math.log(0.5)])
    terms = call(differences, log_ratio, row_index)
    torch.testing.assert_close(terms.detach(), torch.tensor([1.0, 9.0, 2.0], dtype=torch.float64))
    terms.sum().backward()
    # A ratio is in the weights of its own token and of those after it.
    assert log_ratio.grad.tolist() == pytest.approx([10.0, 9.0, 2.0])
    assert differences.grad is None


def test_hand_numbers_of_completion_kl_in_a_group_of_two_and_a_row_alone():
    divergences, row_index = tensors([1.0, 2.0, 9.0, 3.0], [4.0, 5.0], [6.0, 7.0])
    log_ratio = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    trainable = torch.tensor([True, True, False, True, True, True, True, True])
    values = completion_kl(divergences, log_ratio, trainable, row_index, [3, 3, 8], longest=3)
    assert values.tolist() == pytest.approx([1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    values.sum().backward()
    assert divergences.grad.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    # Of the policy's tokens, later sums are (5, 3, 0), (5, 0) and (7, 0); each is compared with the other row's.
    credit = [5 - 5, 3 - 0, 0, 0, 5 - 5, 0 - 3, 7, 0]
    assert log_ratio.grad.tolist() == credit


def test_the_divergence_at_a_token_has_the_weight_of_the_tokens_before_it():
    """The ratio of the token itself has mean 1: with it, the mean would be the same, and the variance larger."""
    divergences, row_index = tensors([1.0, 2.0, 9.0, 3.0])
    log_ratio = torch.tensor([2.0, 5.0, 7.0, 4.0], dtype=torch.float64).log()
    trainable = torch.tensor([True, True, False, True])
    values = completion_kl(divergences, log_ratio, trainable, row_index, [0], longest=3)
    assert values.tolist() == pytest.approx([1.0, 2 * 2.0, 0.0, 2 * 5 * 3.0])


def test_on_policy_a_token_answers_for_its_own_and_later_divergence():
    differences, row_index = tensors([0.5, -0.25, 1.0], [2.0])
    log_ratio = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    terms = call(differences, log_ratio, row_index)
    assert terms.tolist() == [0.5, -0.25, 1.0, 2.0]
    terms.sum().backward()
    assert log_ratio.grad.tolist() == [1.25, 0.75, 1.0, 2.0]


def test_a_weight_above_the_cap_is_the_cap_and_keeps_its_pull():
    differences, _ = tensors([0.5, 1.5, 2.0])
    log_ratio, row_index = tensors([math.log(2), math.log(3), math.log(0.1)])
    terms = call(differences, log_ratio, row_index, cap=4.0)
    # Weights 2, 6 -> 4 and 0.6, which is made of the uncut product.
    torch.testing.assert_close(terms.detach(), torch.tensor([1.0, 6.0, 1.2], dtype=torch.float64))
    terms.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([8.2, 7.2, 1.2])


def test_a_cap_keeps_weights_finite_that_would_overflow():
    log_ratio = torch.full((50,), 10.0, requires_grad=True)
    arguments = (torch.zeros(50), torch.ones(50), log_ratio, torch.ones(50, dtype=torch.bool))
    terms = sequence_kl(*arguments, torch.zeros(50, dtype=torch.long), 1, SequenceKLParams(weight_cap=5.0))
    assert terms.tolist() == pytest.approx([-5.0] * 50)
    terms.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([-5.0 * (50 - i) for i in range(50)])


def test_tokens_that_are_not_trainable_count_for_nothing_whatever_they_hold():
    trainable = [True, False, True, True]
    differences, _ = tensors([0.5, math.nan, 1.5], [4.0])
    log_ratio, row_index = tensors([math.log(2), math.nan, math.log(3)], [0.0])
    terms = call(differences, log_ratio, row_index, trainable=trainable)
    torch.testing.assert_close(terms.detach(), torch.tensor([1.0, 0.0, 9.0, 4.0], dtype=torch.float64))
    terms.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([10.0, 0.0, 9.0, 4.0])


def test_rows_do_not_depend_on_what_stands_before_them():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, generator=generator).double().tolist() for length in (3, 1, 7, 2)]
    log_ratio, row_index = tensors(*rows)
    differences = torch.linspace(-1, 1, len(log_ratio), dtype=torch.float64)
    whole = call(differences, log_ratio, row_index)
    for row in range(4):
        mine = row_index == row
        alone = call(differences[mine], log_ratio[mine], torch.zeros(int(mine.sum()), dtype=torch.long))
        torch.testing.assert_close(whole[mine], alone, rtol=1e-13, atol=1e-14)


def test_a_row_behind_a_million_tokens_keeps_its_digits_in_float32():
    values = torch.full((1_000_003,), 0.3)
    values[-3:] = torch.tensor([1e-5, -2e-5, 4e-5])
    row_index = torch.zeros(1_000_003, dtype=torch.long)
    row_index[-3:] = 1
    sums = row_prefix_sums(values.requires_grad_(), row_index, 2)
    assert sums.dtype == torch.float32
    # The sum before them is 3e5, where float32 is spaced by 1/32.
    torch.testing.assert_close(sums[-3:].detach(), torch.tensor([1e-5, -1e-5, 3e-5]), rtol=1e-4, atol=0)
    sums.sum().backward()
    assert values.grad[:2].tolist() == [1_000_000.0, 999_999.0]
    assert values.grad[-3:].tolist() == [3.0, 2.0, 1.0]


def test_the_dtype_of_a_sum_is_that_of_the_log_probs():
    for dtype in (torch.float32, torch.float64):
        zeros = torch.zeros(2, dtype=dtype)
        terms = sequence_kl(
            zeros,
            zeros,
            zeros,
            torch.ones(2, dtype=torch.bool),
            torch.zeros(2, dtype=torch.long),
            1,
            SequenceKLParams(weight_cap=2.0),
        )
        assert terms.dtype == dtype


@pytest.mark.parametrize("cap", [0.9, 0.0, -1.0, math.inf, math.nan])
def test_a_cap_that_is_not_at_least_one_is_refused(cap):
    values, row_index = tensors([0.0])
    with pytest.raises(ValueError, match=r"weight_cap=.*: must be a number >= 1"):
        call(values, values, row_index, cap=cap)


def test_sequences_of_other_shapes_are_refused():
    values, row_index = tensors([0.0, 1.0])
    with pytest.raises(ValueError, match="shapes differ"):
        call(values, values[:1], row_index)
    with pytest.raises(ValueError, match=r"shapes differ: values \(2,\), row_index \(1,\)"):
        row_prefix_sums(values, row_index[:1], 1)
