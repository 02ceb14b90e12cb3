"""The divergence of chunked_logprobs and module_logprobs against the dense divergence of all logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefrl.losses import truncation
from prefrl.losses.kl import ReferenceLogits, divergence, full_kl, reference_log_probs
from prefrl.losses.logprobs import KEPT_BYTES, Head, chunked_logprobs
from prefrl.losses.module_logprobs import module_logprobs
from prefrl.losses.per_token import TokenScores
from prefrl.losses.truncation import TokenHistory, TokenTruncation, Truncation

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 3.0},
}
FUNCTIONS = ["matrix", "module"]


def make(m, *, hidden_size=6, vocab=11, bias=False, scale=1.0, softcap=None, dtype=torch.float32, seed=0):
    """Hidden states, targets and a head, all leaves; and a reference with hidden states of another size."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = randn(m, hidden_size).requires_grad_(), randn(vocab, hidden_size).requires_grad_()
    targets = torch.randint(vocab, (m,), generator=generator)
    head = Head(weight, randn(vocab).requires_grad_() if bias else None, scale, softcap)
    other = torch.nn.Linear(4, vocab).to(dtype)
    for parameter in other.parameters():
        parameter.data = randn(*parameter.shape)
    return hidden, targets, head, ReferenceLogits(randn(m, 4).requires_grad_(), other)


def all_logits(hidden, head):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def plain_divergence(p, q, beta):
    """Generalized Jensen-Shannon divergence of probabilities [c, V] by its definition, 0 log 0 = 0."""

    def kl(a, b):
        log_ratio = (a / b.where(a > 0, 1.0)).where(a > 0, 1.0).log()
        return (a * log_ratio).sum(1)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    mixed = beta * q + (1 - beta) * p
    return beta * kl(q, mixed) + (1 - beta) * kl(p, mixed)


def dense(hidden, targets, head, reference, temperature):
    log_p = (all_logits(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(
        1
    )
    log_q = (reference.head(reference.hidden).detach().to(log_p.dtype) / temperature).log_softmax(1)
    return TokenScores.of(
        log_p[range(len(targets)), targets],
        entropy=-(log_p.exp() * log_p).sum(1),
        divergence=plain_divergence(log_p.exp(), log_q.exp(), reference.beta),
    )


WITH_ENTROPY = ("entropy", "entropy_gradient")


def score(function, hidden, targets, head, reference, temperature=0.7, want=WITH_ENTROPY, **options):
    if function == "recomputed":
        options["keep_bytes"] = 0
    if function != "module":
        given, call = head, chunked_logprobs
    else:
        given, call = (lambda rows: all_logits(rows, head)), module_logprobs
    return call(hidden, targets, given, temperature=temperature, want=want, reference=reference, **options)


def leaves_of(hidden, head):
    return [hidden, head.weight] + ([] if head.bias is None else [head.bias])


def gradients(scores, leaves, names=("logprobs", "entropy", "divergence")):
    """Of a loss that weighs every token and every quantity differently."""
    weights = torch.linspace(-1.0, 2.0, len(scores.logprobs), dtype=scores.logprobs.dtype)
    factors = {"logprobs": 1.0, "entropy": 0.7, "divergence": 1.3}
    loss = sum(factors[n] * (weights.pow(i + 1) * getattr(scores, n)).sum() for i, n in enumerate(names))
    return torch.autograd.grad(loss, leaves, retain_graph=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hand_number(function):
    # p = (3/4, 1/4) and q = (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2 = log 2 - H(p) = 0.130812.
    # With z = (log 3, 0): dKL/dz = p (log p - log q - KL) = 3/4 (log 3/2 - KL) = 0.205990 and its negative.
    hidden = torch.ones(1, 1, requires_grad=True)
    head = Head(torch.tensor([[math.log(3)], [0.0]], requires_grad=True))
    reference = ReferenceLogits(torch.ones(1, 1), lambda rows: rows @ torch.tensor([[5.0, 5.0]]))
    scores = score(function, hidden, torch.tensor([0]), head, reference, temperature=1.0)
    assert scores.divergence.tolist() == pytest.approx([0.130812], abs=1e-6)
    scores.divergence.sum().backward()
    assert head.weight.grad.flatten().tolist() == pytest.approx([0.205990, -0.205990], abs=1e-6)
    assert hidden.grad.item() == pytest.approx(0.205990 * math.log(3), abs=1e-6)


# Chunks know nothing of what a head does to its logits.
CHUNKS = [*((size, 1.0) for size in (1, 4, 13, 50, None)), (4, 0.0), (None, 0.0), (4, 0.5), (None, 0.1), (13, 0.99)]


@pytest.mark.parametrize("function", [*FUNCTIONS, "recomputed"])
@pytest.mark.parametrize(
    ("head_options", "chunk_size", "beta"),
    [(HEADS["all"], *case) for case in CHUNKS] + [(options, 4, 0.5) for options in HEADS.values()],
    ids=str,
)
def test_equals_the_dense_divergence_and_its_gradients_for_any_chunk_size(head_options, chunk_size, beta, function):
    hidden, targets, head, reference = make(13, dtype=torch.float64, **head_options)
    reference = replace(reference, beta=beta)
    scores = score(function, hidden, targets, head, reference, chunk_size=chunk_size)
    expected = dense(hidden, targets, head, reference, 0.7)
    leaves = leaves_of(hidden, head)
    torch.testing.assert_close(scores.divergence, expected.divergence, rtol=1e-12, atol=1e-12)
    for names in (
        ("logprobs", "entropy", "divergence"),
        ("divergence",),
        ("logprobs", "divergence"),
        ("entropy", "divergence"),
    ):
        for ours, theirs in zip(gradients(scores, leaves, names), gradients(expected, leaves, names), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
def test_nothing_else_needs_to_be_wanted(head_options, function):
    hidden, targets, head, reference = make(13, dtype=torch.float64, **head_options)
    scores = score(function, hidden, targets, head, reference, want=(), chunk_size=4)
    expected = dense(hidden, targets, head, reference, 0.7)
    assert scores.wanted.keys() == {"divergence"}
    torch.testing.assert_close(scores.divergence, expected.divergence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    names, leaves = ("logprobs", "divergence"), leaves_of(hidden, head)
    for ours, theirs in zip(gradients(scores, leaves, names), gradients(expected, leaves, names), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_is_a_constant(function):
    hidden, targets, head, reference = make(5)
    scores = score(function, hidden, targets, head, reference)
    scores.divergence.sum().backward()
    assert reference.hidden.grad is None
    assert all(parameter.grad is None for parameter in reference.head.parameters())


def test_log_probs_of_the_reference_keep_no_graph_of_its_head():
    _, _, _, reference = make(5)
    log_probs = reference_log_probs(reference, temperature=0.7, dtype=torch.float64)(slice(1, 3))
    assert not log_probs.requires_grad
    assert log_probs.dtype == torch.float64
    expected = (reference.head(reference.hidden[1:3]).detach().double() / 0.7).log_softmax(1)
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_reference_there_is_no_divergence_and_with_one_nothing_else_changes(function):
    hidden, targets, head, reference = make(9, bias=True, softcap=3.0)
    want = (*WITH_ENTROPY, "correct", "mean_logit", "log_collision")
    without = (
        score(function, hidden, targets, head, None, want=want, keep_bytes=0)
        if function == "matrix"
        else score(function, hidden, targets, head, None, want=want)
    )
    with_one = score(function, hidden, targets, head, reference, want=want)
    assert without.wanted.keys() == {"entropy", "correct", "mean_logit", "log_collision"}
    assert with_one.wanted.keys() == {*without.wanted, "divergence"}
    for name in ("logprobs", "entropy", "correct", "mean_logit", "log_collision"):
        assert getattr(without, name).equal(getattr(with_one, name))
    names, leaves = ("logprobs", "entropy"), leaves_of(hidden, head)
    for a, b in zip(gradients(without, leaves, names), gradients(with_one, leaves, names), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reference_that_is_the_policy_has_no_divergence_and_no_gradient(function, beta):
    hidden, targets, head, _ = make(9, scale=3.0)
    reference = ReferenceLogits(hidden.detach(), lambda rows: all_logits(rows, head), beta)
    scores = score(function, hidden, targets, head, reference)
    assert scores.divergence.abs().max() < 2e-6
    assert all(g.abs().max() < 2e-5 for g in gradients(scores, leaves_of(hidden, head), ("divergence",)))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_keeps_the_digits_of_a_small_divergence(function, beta):
    hidden, targets, head, _ = make(9, vocab=500, hidden_size=16)
    shift = 1e-2 * torch.randn(9, 16, generator=torch.Generator().manual_seed(4))
    reference = ReferenceLogits(hidden.detach() + shift, lambda rows: all_logits(rows, head), beta)
    exact_head = Head(head.weight.detach().double().requires_grad_())
    exact_reference = ReferenceLogits(reference.hidden.double(), lambda rows: all_logits(rows, exact_head), beta)
    exact_hidden = hidden.detach().double().requires_grad_()
    scores = score(function, hidden, targets, head, reference)
    expected = dense(exact_hidden, targets, exact_head, exact_reference, 0.7)
    assert 1e-6 < expected.divergence.mean() < 1e-2
    torch.testing.assert_close(scores.divergence.double(), expected.divergence, rtol=0, atol=3e-6)
    ours = gradients(scores, leaves_of(hidden, head), ("divergence",))
    theirs = gradients(expected, leaves_of(exact_hidden, exact_head), ("divergence",))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 2e-4 * b.norm()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_rounds_products_of_both_and_nothing_after_them(function):
    hidden, targets, head, reference = make(12, hidden_size=32, vocab=50, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(function, hidden, targets, head, reference, chunk_size=5)
    # Backward runs outside, as a trainer's does; the reference's logits are made there again.
    ours = gradients(scores, leaves_of(hidden, head))
    low = [leaf.detach().bfloat16().float().requires_grad_() for leaf in leaves_of(hidden, head)]
    low_reference = reference.head(reference.hidden.detach()).detach()

    class Rounded(torch.autograd.Function):
        """bfloat16 logits with the gradient of exact ones."""

        @staticmethod
        def forward(ctx, logits):
            return logits.bfloat16().float()

        @staticmethod
        def backward(ctx, grad):
            return grad

    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_q = (reference.head(reference.hidden.detach()).float() / 0.7).log_softmax(1)
    log_p = (Rounded.apply(torch.nn.functional.linear(low[0], low[1], low[2])) / 0.7).log_softmax(1)
    expected = TokenScores.of(
        log_p[range(12), targets],
        entropy=-(log_p.exp() * log_p).sum(1),
        divergence=(log_p.exp() * (log_p - log_q)).sum(1),
    )
    assert scores.divergence.dtype == torch.float32
    assert (log_q - (low_reference / 0.7).log_softmax(1)).abs().max() > 1e-2  # the rounding is seen
    torch.testing.assert_close(scores.divergence, expected.divergence, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, gradients(expected, low), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.01 * b.norm()


class LargestTensor(TorchDispatchMode):
    """Records the largest output of any operator."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tensor_of_all_tokens_by_vocabulary_is_made(function, softcap):
    m, vocab, hidden_size, chunk_size = 64, 96, 4, 8
    hidden, targets, head, reference = make(m, vocab=vocab, hidden_size=hidden_size, softcap=softcap)
    # A byte less than the probabilities and the gradients of the divergences take.
    options = {"keep_bytes": 2 * m * vocab * 4 - 1} if function == "matrix" else {}
    with LargestTensor() as largest:
        scores = score(function, hidden, targets, head, reference, chunk_size=chunk_size, **options)
        gradients(scores, [hidden, head.weight])
    assert largest.numel == chunk_size * vocab
    with LargestTensor() as largest:
        dense(hidden, targets, head, reference, 0.7)
    assert largest.numel == m * vocab  # the meter sees such a tensor


@pytest.mark.parametrize(("function", "passes"), [("matrix", 1), ("recomputed", 2), ("module", 2)])
def test_a_divergence_that_no_loss_reads_costs_the_reference_one_pass(function, passes):
    hidden, targets, head, reference = make(8)
    rows = []

    def counting(hidden):
        rows.append(len(hidden))
        return reference.head(hidden)

    scores = score(function, hidden, targets, head, replace(reference, head=counting), chunk_size=4)
    assert rows == [4, 4]
    if function != "module":
        scores.logprobs.sum().backward(retain_graph=True)
        assert rows == [4, 4]
    scores.divergence.sum().backward()
    assert rows == [4, 4] * passes


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_empty_batch_has_zero_gradients(function):
    hidden, targets, head, reference = make(0, bias=True)
    scores = score(function, hidden, targets, head, reference)
    assert scores.divergence.shape == (0,)
    for leaf, grad in zip(leaves_of(hidden, head), gradients(scores, leaves_of(hidden, head)), strict=True):
        assert grad.equal(torch.zeros_like(leaf))


def test_nothing_is_saved_without_grad():
    hidden, targets, head, reference = make(5)
    with torch.no_grad():
        scores = score("matrix", hidden, targets, head, reference)
    assert scores.divergence.grad_fn is None
    torch.testing.assert_close(scores.divergence, dense(hidden, targets, head, reference, 0.7).divergence)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_reference_of_other_tokens_or_another_vocabulary_is_refused(function):
    hidden, targets, head, reference = make(5)
    with pytest.raises(ValueError, match=r"reference.hidden \(4, 4\), hidden \(5, 6\): need to be \[M, h\] each"):
        score(function, hidden, targets, head, replace(reference, hidden=reference.hidden[1:]))
    with pytest.raises(ValueError, match=r"shapes differ: .*11.*12"):
        score(function, hidden, targets, head, replace(reference, head=torch.nn.Linear(4, 12)))


def test_the_divergence_of_a_chunk_is_not_symmetric():
    log_p, log_q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert full_kl(log_p, log_q).item() == pytest.approx(0.130812, abs=1e-6)
    assert full_kl(log_q, log_p).item() == pytest.approx(0.143841, abs=1e-6)
    assert divergence(log_p, log_q, beta=0.0).item() == pytest.approx(0.143841, abs=1e-6)
    # m = (5/8, 3/8): (KL(p, m) + KL(q, m)) / 2 = (0.035375 + 0.032269) / 2.
    assert divergence(log_p, log_q, beta=0.5).item() == pytest.approx(0.033822, abs=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wanted_hidden_states_are_those_given(function):
    hidden, targets, head, _ = make(5)
    assert score(function, hidden, targets, head, None, want=("hidden",)).hidden is hidden
    assert score(function, hidden, targets, head, None, want=()).wanted == {}


WANT = ("entropy", "entropy_gradient", "log_collision")
CUTS = {
    "top_k": Truncation(top_k=4),
    "top_p": Truncation(top_p=0.7),
    "min_p": Truncation(min_p=0.2),
    "penalty": Truncation(repetition_penalty=1.4),
    "all": Truncation(top_k=6, top_p=0.8, min_p=0.05, repetition_penalty=0.7),
}
# What is kept is decided by logits, whatever a head does to make them.
CASES_OF_CUTS = [pytest.param(cuts, {}, id=name) for name, cuts in CUTS.items()]
CASES_OF_CUTS += [pytest.param(CUTS["all"], {"scale": 1.7, "softcap": 3.0}, id="softcap")]


def truncated_score(logits, targets, cuts, function="matrix", **options):
    """Scores of rows of logits, which an identity as the head leaves as they are."""
    options = {"temperature": 1.0, "want": WANT, "truncation": TokenTruncation(cuts, None), **options}
    logits, targets = torch.as_tensor(logits), torch.tensor(targets)
    if function == "matrix":
        return chunked_logprobs(logits, targets, Head(torch.eye(logits.size(1))), **options)
    return module_logprobs(logits, targets, lambda x: x, **options)


@pytest.mark.parametrize("function", ["matrix", "module"])
@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        ({"top_k": 2}, 0.4 + 0.3),
        ({"top_p": 0.75}, 0.4 + 0.3 + 0.2),
        ({"top_p": 0.65}, 0.4 + 0.3),
        ({"min_p": 0.4}, 0.4 + 0.3 + 0.2),
        ({"top_k": 3, "top_p": 0.75}, 0.4 + 0.3),  # the third is beyond 0.7 / 0.9 of what top_k keeps
        ({"min_p": 0.4, "top_p": 0.75}, 0.4 + 0.3),  # likewise, of what min_p keeps
        ({}, 1.0),
    ],
)
def test_hand_numbers(function, cuts, kept):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    scores = truncated_score(logits, [3], Truncation(**cuts), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.3 / kept), abs=1e-6)
    shares = [p / kept for p in (0.4, 0.3, 0.2, 0.1)]
    shares = shares[: {0.7: 2, 0.9: 3, 1.0: 4}[round(kept, 1)]]
    assert float(scores.entropy) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-6)
    assert float(scores.log_collision) == pytest.approx(math.log(sum(p * p for p in shares)), abs=1e-6)


@pytest.mark.parametrize("function", ["matrix", "module"])
def test_a_sampled_token_that_is_not_kept_counts_as_kept(function):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().requires_grad_()
    scores = truncated_score(logits, [0], Truncation(top_k=2), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.1 / 0.8), abs=1e-6)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[1 - 0.125, -0.5, 0.0, -0.375]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("function", ["matrix", "module"])
def test_tokens_that_tie_for_the_last_place_share_it(function):
    # With top_p = 0.6 two of the three last tokens fit, whichever: Z = 0.4 + 0.2 + 0.2.
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log().requires_grad_()
    scores = truncated_score(logits, [2], Truncation(top_p=0.65), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.2 / 0.8), abs=1e-6)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    share = 2 / 3 * 0.2 / 0.8
    torch.testing.assert_close(gradient, torch.tensor([[-share, -0.5, 1 - share, -share]]), atol=1e-6, rtol=0)
    # Of the top_k, those with the last one's logit are kept, too, as by the processors.
    assert float(truncated_score(logits, [2], Truncation(top_k=2), function).logprobs.detach()) == pytest.approx(
        math.log(0.2), abs=1e-6
    )
    scores = truncated_score(logits, [2], Truncation(top_k=2, top_p=0.65), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.2 / 0.8), abs=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("cuts", [{"top_p": 0.9}, {"top_p": 0.99, "min_p": 0.01}, {"top_k": 50, "top_p": 0.9}])
def test_large_and_small_sets_are_those_of_the_processors(cuts, spread, monkeypatch):
    monkeypatch.setattr(truncation, "_CACHED", 15_000)  # three rows at once
    logits = spread * torch.randn(40, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    processors = [MinPLogitsWarper(cuts.get("min_p", 0.0)), TopKLogitsWarper(cuts.get("top_k", 5000))]
    expected = logits
    for processor in (*processors, TopPLogitsWarper(cuts["top_p"])):
        expected = processor(None, expected)
    targets = expected.softmax(1).multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    ours = truncated_score(logits, targets.tolist(), Truncation(**cuts), "module").logprobs
    torch.testing.assert_close(ours, expected.log_softmax(1)[range(40), targets], atol=1e-9, rtol=0)


def random_problem(num_tokens, **head_options):
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, head = leaf(num_tokens, 5), Head(leaf(11, 5), leaf(11), **head_options)
    texts = torch.randint(11, (3, 9), generator=generator)
    response = torch.randint(3, (num_tokens,), generator=generator)
    history = TokenHistory(texts, response, torch.randint(1, 9, (num_tokens,), generator=generator))
    targets = torch.randint(11, (num_tokens,), generator=generator)
    return hidden, head, history, targets, ReferenceLogits(leaf(num_tokens, 11).detach(), lambda x: x)


def logits_of_all(hidden, head):
    logits = (hidden @ head.weight.t() + head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def processed(logits, cuts, history, targets):
    """Logits at temperature 0.7 after the processors, with the target; and which are kept."""
    rows = []
    for place, (row, target) in enumerate(zip(logits, targets, strict=True)):
        text = history.ids[history.response[place]][: history.length[place]].unique()  # for the gradient
        penalized = RepetitionPenaltyLogitsProcessor(cuts.repetition_penalty)(text[None], row[None])
        penalized = TemperatureLogitsWarper(0.7)(text, penalized)
        kept = MinPLogitsWarper(cuts.min_p)(text, penalized.detach())
        for processor in (TopKLogitsWarper(cuts.top_k or 11), TopPLogitsWarper(cuts.top_p)):
            kept = processor(text, kept)
        is_kept = kept.isfinite().scatter(1, target.view(1, 1), value=True)
        rows.append(penalized.masked_fill(~is_kept, -torch.inf))
    return torch.cat(rows)


@pytest.mark.parametrize("function", [*FUNCTIONS, "recomputed"])
@pytest.mark.parametrize(("cuts", "head_options"), CASES_OF_CUTS)
@pytest.mark.parametrize("beta", [None, 1.0, 0.5, 0.0])  # of the divergence; None: there is no reference
def test_values_and_gradients_are_those_of_the_processed_logits(cuts, head_options, function, beta):
    hidden, head, history, targets, reference = random_problem(13, **head_options)
    used = history if cuts.repetition_penalty != 1 else None
    options = {"temperature": 0.7, "want": WANT, "truncation": TokenTruncation(cuts, used), "chunk_size": 4}
    options["reference"] = None if beta is None else replace(reference, beta=beta)
    if function != "module":
        keep_bytes = 0 if function == "recomputed" else KEPT_BYTES
        scores = chunked_logprobs(hidden, targets, head, keep_bytes=keep_bytes, **options)
    else:
        plain = Head(head.weight, head.bias, head.scale, head.softcap)
        scores = module_logprobs(hidden, targets, lambda x: logits_of_all(x, plain), **options)
    logits = processed(logits_of_all(hidden, head), cuts, history, targets)
    log_probs = logits.log_softmax(1)
    finite = log_probs.where(log_probs.isfinite(), 0.0)
    probs = log_probs.exp()
    entropy = -(probs * finite).sum(1)
    expected = {"logprobs": log_probs[range(13), targets], "entropy": entropy}
    if beta is not None:
        factors = TokenTruncation(cuts, used).penalties(reference.hidden / 0.7)
        of_reference = reference.hidden / 0.7 * (1 if factors is None else factors)
        log_ref = of_reference.masked_fill(logits.isinf(), -torch.inf).log_softmax(1)
        expected["divergence"] = plain_divergence(probs, log_ref.exp(), beta)
    torch.testing.assert_close(scores.log_collision, probs.square().sum(1).log().detach())
    weights = torch.linspace(-1.0, 2.0, 13, dtype=torch.float64)
    leaves = [hidden, head.weight, head.bias]
    for name, values in expected.items():
        found = getattr(scores, name)
        torch.testing.assert_close(found, values)
        ours = torch.autograd.grad((weights * found).sum(), leaves, retain_graph=True)
        theirs = torch.autograd.grad((weights * values).sum(), leaves, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
