"""Log-probs of truncated sampling, against the processors of transformers on all logits."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefrl.losses import truncation
from prefrl.losses.kl import ReferenceLogits
from prefrl.losses.logprobs import KEPT_BYTES, Head, chunked_logprobs, module_logprobs
from prefrl.losses.truncation import TokenHistory, TokenTruncation, Truncation

WANT = ("entropy", "entropy_gradient", "log_collision")
CUTS = {
    "top_k": Truncation(top_k=4),
    "top_p": Truncation(top_p=0.7),
    "min_p": Truncation(min_p=0.2),
    "penalty": Truncation(repetition_penalty=1.4),
    "all": Truncation(top_k=6, top_p=0.8, min_p=0.05, repetition_penalty=0.7),
}
HEADS = {"plain": {}, "softcap": {"scale": 1.7, "softcap": 3.0}}


def score(logits, targets, cuts, function="matrix", **options):
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
    scores = score(logits, [3], Truncation(**cuts), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.3 / kept), abs=1e-6)
    shares = [p / kept for p in (0.4, 0.3, 0.2, 0.1)]
    shares = shares[: {0.7: 2, 0.9: 3, 1.0: 4}[round(kept, 1)]]
    assert float(scores.entropy) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-6)
    assert float(scores.log_collision) == pytest.approx(math.log(sum(p * p for p in shares)), abs=1e-6)


@pytest.mark.parametrize("function", ["matrix", "module"])
def test_a_sampled_token_that_is_not_kept_counts_as_kept(function):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().requires_grad_()
    scores = score(logits, [0], Truncation(top_k=2), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.1 / 0.8), abs=1e-6)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[1 - 0.125, -0.5, 0.0, -0.375]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("function", ["matrix", "module"])
def test_tokens_that_tie_for_the_last_place_share_it(function):
    # With top_p = 0.6 two of the three last tokens fit, whichever: Z = 0.4 + 0.2 + 0.2.
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log().requires_grad_()
    scores = score(logits, [2], Truncation(top_p=0.65), function)
    assert float(scores.logprobs.detach()) == pytest.approx(math.log(0.2 / 0.8), abs=1e-6)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    share = 2 / 3 * 0.2 / 0.8
    torch.testing.assert_close(gradient, torch.tensor([[-share, -0.5, 1 - share, -share]]), atol=1e-6, rtol=0)
    # Of the top_k, those with the last one's logit are kept, too, as by the processors.
    assert float(score(logits, [2], Truncation(top_k=2), function).logprobs.detach()) == pytest.approx(
        math.log(0.2), abs=1e-6
    )
    scores = score(logits, [2], Truncation(top_k=2, top_p=0.65), function)
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
    ours = score(logits, targets.tolist(), Truncation(**cuts), "module").logprobs
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


def all_logits(hidden, head):
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


@pytest.mark.parametrize("keep_bytes", [0, KEPT_BYTES])
@pytest.mark.parametrize("function", ["matrix", "module"])
@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("has_reference", [False, True])
def test_values_and_gradients_are_those_of_the_processed_logits(
    cuts, head_options, function, keep_bytes, has_reference
):
    hidden, head, history, targets, reference = random_problem(13, **head_options)
    used = history if cuts.repetition_penalty != 1 else None
    options = {"temperature": 0.7, "want": WANT, "truncation": TokenTruncation(cuts, used), "chunk_size": 4}
    options["reference"] = reference if has_reference else None
    if function == "matrix":
        scores = chunked_logprobs(hidden, targets, head, keep_bytes=keep_bytes, **options)
    else:
        plain = Head(head.weight, head.bias, head.scale, head.softcap)
        scores = module_logprobs(hidden, targets, lambda x: all_logits(x, plain), **options)
    logits = processed(all_logits(hidden, head), cuts, history, targets)
    log_probs = logits.log_softmax(1)
    finite = log_probs.where(log_probs.isfinite(), 0.0)
    probs = log_probs.exp()
    entropy = -(probs * finite).sum(1)
    expected = {"logprobs": log_probs[range(13), targets], "entropy": entropy}
    if has_reference:
        factors = TokenTruncation(cuts, used).penalties(reference.hidden / 0.7)
        of_reference = reference.hidden / 0.7 * (1 if factors is None else factors)
        log_ref = of_reference.masked_fill(logits.isinf(), -torch.inf).log_softmax(1)
        expected["full_kl"] = (probs * (finite - log_ref.where(log_ref.isfinite(), 0.0))).sum(1)
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
