"""sequence_kl against the divergence of all sequences of 3 tokens out of 3, summed one by one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from prefrl.losses.kl import row_prefix_sums, sequence_kl
from prefrl.options.policy import SequenceKLParams

V, T = 3, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))
PREFIXES = [prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)]


def policy(seed):
    """[prefix, V] logits: the next token depends on everything before it."""
    return torch.randn(len(PREFIXES), V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


POLICY, REFERENCE, SAMPLER = policy(0), policy(1), policy(2)


def token_logprobs(logits):
    """[27 * 3]: all sequences as rows, end to end."""
    log_softmax = logits.log_softmax(1)
    return torch.stack(
        [log_softmax[PREFIXES.index(sequence[:t]), sequence[t]] for sequence in SEQUENCES for t in range(T)]
    )


def exact():
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


@pytest.mark.parametrize("sampler", [SAMPLER, POLICY], ids=["another policy", "the policy itself"])
def test_value_and_gradient_are_those_of_all_sequences(sampler):
    value, gradient = estimated(sampler)
    exact_value, exact_gradient = exact()
    assert exact_value > 0.5
    assert_equal(value, exact_value)
    assert_equal(gradient, exact_gradient)


def test_a_cap_that_no_weight_reaches_changes_nothing():
    for ours, theirs in zip(estimated(SAMPLER, cap=1e6), exact(), strict=True):
        assert_equal(ours, theirs)


def test_a_cap_on_samples_of_the_policy_itself_changes_nothing():
    for ours, theirs in zip(estimated(POLICY, cap=1.0), exact(), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("cap", [1.0, 1.5, 3.0])
def test_the_bias_of_a_cap_is_within_its_bound(cap):
    value, exact_value = estimated(SAMPLER, cap=cap)[0], exact()[0]
    log_pi, log_mu, log_ref = token_logprobs(POLICY), token_logprobs(SAMPLER), token_logprobs(REFERENCE)
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


def test_the_dtype_is_that_of_the_log_probs():
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


def test_shapes_that_would_broadcast_are_refused():
    values, row_index = tensors([0.0, 1.0])
    with pytest.raises(ValueError, match="shapes differ"):
        call(values, values[:1], row_index)
    with pytest.raises(ValueError, match=r"shapes differ: values \(2,\), row_index \(1,\)"):
        row_prefix_sums(values, row_index[:1], 1)
