"""The divergence from likely tokens and one bucket of all others, against the plain formula on all logits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefrl.losses.kl import ReferenceLogits, divergence
from prefrl.losses.logprobs import Head
from prefrl.losses.top_logprobs import TopLogprobs
from prefrl.losses.truncation import TokenHistory, TokenTruncation, Truncation
from tests.unit.losses.test_kl_full import (
    FUNCTIONS,
    HEADS,
    all_logits,
    gradients,
    leaves_of,
    make,
    plain_divergence,
    score,
)

TEMPERATURE = 0.7
BETAS = [1.0, 0.5, 0.1, 0.0]
CUTS = {"whole": Truncation(), "top_k": Truncation(top_k=4), "top_p": Truncation(top_p=0.9)}


def of_reference(reference):
    """[M, V] probabilities of the reference."""
    return (reference.head(reference.hidden).detach() / TEMPERATURE).softmax(1)


def likely(probs, k, beta, dtype=torch.float64):
    ids = probs.topk(k, 1).indices
    return TopLogprobs(ids.int(), probs.gather(1, ids).log().to(dtype), beta)


def buckets(probs, ids):
    """[M, k + 1] of probabilities [M, V]; without the last one for k = V."""
    kept = probs.gather(1, ids)
    others = probs.scatter(1, ids, 0.0).sum(1, keepdim=True)
    return kept if ids.size(1) == probs.size(1) else torch.cat([kept, others], 1)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("k", [1, 4, 11])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("cuts", "head_options"),  # what is kept is decided by logits, whatever a head does to make them
    [*((cuts, HEADS["plain"]) for cuts in CUTS.values()), (CUTS["top_p"], HEADS["all"])],
    ids=[*CUTS, "all"],
)
def test_value_and_gradient_are_those_of_the_buckets(head_options, cuts, beta, k, function):
    hidden, targets, head, reference = make(13, dtype=torch.float64, **head_options)
    probs = of_reference(reference)
    top, truncation = likely(probs, k, beta), TokenTruncation(cuts, None)
    scores = score(function, hidden, targets, head, top, chunk_size=4, truncation=truncation)

    logits = all_logits(hidden, head) / TEMPERATURE
    is_kept = torch.ones_like(logits, dtype=torch.bool)
    if not cuts.is_whole:
        without = score(function, hidden, targets, head, None, truncation=truncation, want=())
        # The kept tokens have at least the probability of the last one: found from the log-prob of the target.
        log_normalizers = logits.gather(1, targets[:, None]).squeeze(1) - without.logprobs
        is_kept = _kept(logits.detach(), log_normalizers.detach(), targets)
    policy = logits.masked_fill(~is_kept, -torch.inf).log_softmax(1)
    ids = top.ids.long()
    q = buckets(probs, ids)
    inside = torch.cat([is_kept.gather(1, ids), (is_kept.sum(1) > is_kept.gather(1, ids).sum(1))[:, None]], 1)
    q = q * inside[:, : q.size(1)]
    expected = plain_divergence(buckets(policy.exp(), ids), q / q.sum(1, keepdim=True), beta)
    torch.testing.assert_close(scores.divergence, expected, rtol=1e-12, atol=1e-12)
    p = policy.exp()
    entropy = -(p * policy.where(is_kept, 0.0)).sum(1)
    plain = {"logprobs": policy[range(13), targets], "entropy": entropy, "divergence": expected}
    weights = torch.linspace(-1.0, 2.0, 13, dtype=torch.float64)
    leaves = leaves_of(hidden, head)
    for names in (("logprobs", "entropy", "divergence"), ("divergence",), ("logprobs", "divergence")):
        factors = {"logprobs": 1.0, "entropy": 0.7, "divergence": 1.3}
        loss = sum(factors[n] * (weights.pow(i + 1) * plain[n]).sum() for i, n in enumerate(names))
        theirs = torch.autograd.grad(loss, leaves, retain_graph=True)
        for ours, other in zip(gradients(scores, leaves, names), theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-11, atol=1e-11)


def _kept(logits, log_normalizers, targets):
    """The largest logits whose log sum exp is the given one, and the targets."""
    rows = []
    for row, normalizer, target in zip(logits, log_normalizers, targets, strict=True):
        order = row.argsort(descending=True).tolist()
        sets = [{*order[: n + 1], int(target)} for n in range(len(order))]
        chosen = min(sets, key=lambda ids: abs(row[list(ids)].logsumexp(0) - normalizer))
        rows.append([token in chosen for token in range(len(row))])
    return torch.tensor(rows)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hand_number(function):
    # p = (1/2, 1/4, 1/4), the reference keeps q_0 = 1/4. Buckets: p' = (1/2, 1/2), q' = (1/4, 3/4).
    # KL = 1/2 log 2 + 1/2 log 2/3 = 0.143841. With g = p' (log p' - log q' - KL): g_0 = 1/2 (log 2 - KL) = 0.274653,
    # and the two other tokens share -0.274653 equally, as they share their probability.
    hidden = torch.ones(1, 1, requires_grad=True)
    head = Head(torch.tensor([[math.log(2)], [0.0], [0.0]], requires_grad=True))
    top = TopLogprobs(torch.tensor([[0]]), torch.tensor([[math.log(1 / 4)]]))
    scores = score(function, hidden, torch.tensor([1]), head, top, temperature=1.0)
    assert scores.divergence.tolist() == pytest.approx([0.143841], abs=1e-6)
    scores.divergence.sum().backward()
    assert head.weight.grad.flatten().tolist() == pytest.approx([0.274653, -0.137327, -0.137327], abs=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_in_float16_are_the_whole_distribution(beta, function):
    hidden, targets, head, reference = make(9, vocab=40)
    whole = score(function, hidden, targets, head, ReferenceLogits(reference.hidden, reference.head, beta))
    top = score(function, hidden, targets, head, likely(of_reference(reference), 40, beta, torch.float16))
    torch.testing.assert_close(top.divergence, whole.divergence, rtol=3e-3, atol=1e-4)
    leaves = leaves_of(hidden, head)
    for a, b in zip(gradients(top, leaves), gradients(whole, leaves), strict=True):
        assert (a - b).norm() <= 3e-3 * b.norm()


logits = st.lists(st.floats(-8, 8), min_size=6, max_size=6)


@settings(max_examples=60, deadline=None)
@given(policy=logits, reference=logits, beta=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_divergence_grows_with_the_kept_tokens_up_to_that_of_the_whole_distribution(policy, reference, beta):
    p, q = (torch.tensor([row], dtype=torch.float64).log_softmax(1) for row in (policy, reference))
    whole = float(divergence(p, q, beta=beta))
    order = q.argsort(1, descending=True)
    found = [
        float(TopLogprobs(order[:, :k], q.gather(1, order[:, :k]), beta).divergence(p, None)) for k in range(1, 7)
    ]
    assert found[-1] == pytest.approx(whole, abs=1e-12)
    # 1 - sum leaves few digits of a small probability.
    assert all(more >= fewer - 1e-9 for fewer, more in pairwise([0.0, *found]))


@pytest.mark.parametrize("beta", BETAS)
def test_rounded_probabilities_above_1_leave_the_others_what_the_least_likely_kept_token_has(beta):
    # exp(-0.0001) + exp(-8) = 1.00024: the others count 0.000335, as the second token does, before all are normalized.
    p = torch.tensor([[0.5, 0.3, 0.2]]).log()
    top = TopLogprobs(torch.tensor([[1, 0]]), torch.tensor([[-1e-4, -8.0]]), beta)
    q = torch.tensor([[-1e-4, -8.0, -8.0]]).softmax(1)
    expected = plain_divergence(torch.tensor([[0.3, 0.5, 0.2]]), q, beta)
    torch.testing.assert_close(top.divergence(p, None), expected)


@pytest.mark.parametrize("beta", BETAS)
def test_the_others_can_be_given_and_all_probabilities_are_divided_by_their_sum(beta):
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    top = TopLogprobs(torch.tensor([[1]]), torch.tensor([[0.6]]).log(), beta, torch.tensor([0.1]).log())
    expected = plain_divergence(torch.tensor([[0.3, 0.7]]).double(), torch.tensor([[6 / 7, 1 / 7]]).double(), beta)
    torch.testing.assert_close(top.divergence(p, None), expected, rtol=1e-6, atol=0)
    everything = TopLogprobs(torch.tensor([[1, 0, 2]]), p[:, [1, 0, 2]], beta, torch.tensor([-torch.inf]))
    assert float(everything.divergence(p, None)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_finite_where_no_probability_is_left_for_the_others(beta, function):
    weight = torch.tensor([[200.0], [0.0], [-3.0]], requires_grad=True)
    top = TopLogprobs(torch.tensor([[0]], dtype=torch.int32), torch.tensor([[-0.01]], dtype=torch.float16), beta)
    scores = score(function, torch.ones(1, 1), torch.tensor([0]), Head(weight), top, temperature=1.0)
    (gradient,) = torch.autograd.grad(scores.divergence.sum(), weight)
    assert scores.divergence.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ((3, 2), (3, 2), r"reference.ids \(3, 2\), reference.logprobs \(3, 2\), hidden \(2, 6\): need to be"),
        ((2, 2), (2, 3), r"reference.logprobs \(2, 3\)"),
        ((2, 0), (2, 0), r"need to be \[M, k\]"),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(ids, logprobs, message, function):
    hidden, targets, head, _ = make(2)
    top = TopLogprobs(torch.zeros(ids, dtype=torch.int32), torch.zeros(logprobs))
    with pytest.raises(ValueError, match=message):
        score(function, hidden, targets, head, top)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_repetition_penalty_is_rejected(function):
    hidden, targets, head, reference = make(2)
    history = TokenHistory(torch.zeros(1, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long), torch.tensor([1, 2]))
    cuts = TokenTruncation(Truncation(repetition_penalty=1.2), history)
    with pytest.raises(ValueError, match="Set repetition_penalty=1"):
        score(function, hidden, targets, head, likely(of_reference(reference), 2, 1.0), truncation=cuts)
