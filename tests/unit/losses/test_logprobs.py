"""chunked_logprobs and module_logprobs against log_softmax of all logits."""

from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prefrl.losses.logprobs import KEPT_BYTES, Head, chunked_logprobs, default_chunk_size
from prefrl.losses.module_logprobs import module_logprobs
from prefrl.losses.per_token import TokenScores, WantName

WITH_ENTROPY = ("entropy", "entropy_gradient")
EVERYTHING = [name for name in get_args(WantName) if name != "hidden"]  # which are what comes in
QUANTITIES = [name for name in EVERYTHING if name != "entropy_gradient"]
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 3.0},
}


def make(m, *, hidden_size=6, vocab=11, bias=False, scale=1.0, softcap=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    hidden, weight = leaf(m, hidden_size), leaf(vocab, hidden_size)
    targets = torch.randint(vocab, (m,), generator=generator)
    return hidden, targets, Head(weight, leaf(vocab) if bias else None, scale, softcap)


def full_logits(hidden, head):
    logits = hidden @ head.weight.t() if head.bias is None else hidden @ head.weight.t() + head.bias
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def full_scores(hidden, targets, head, temperature):
    logits = full_logits(hidden, head)
    log_probs = (logits / temperature).log_softmax(1)
    return TokenScores.of(
        log_probs[range(len(targets)), targets],
        entropy=-(log_probs.exp() * log_probs).sum(1),
        correct=log_probs.argmax(1) == targets,
        mean_logit=logits.detach().mean(1),
        log_collision=log_probs.detach().exp().square().sum(1).log(),
    )


def assert_equal_scores(ours, expected, *, atol=2e-6, rtol=1e-5):
    for name in ("logprobs", "entropy", "mean_logit", "log_collision"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), atol=atol, rtol=rtol)
    assert torch.equal(ours.correct, expected.correct)


def gradients(scores, leaves):
    """Of a loss that weighs every token differently, and entropy otherwise than log-probs."""
    w = torch.linspace(-1.0, 2.0, len(scores.logprobs), dtype=scores.logprobs.dtype, device=scores.logprobs.device)
    return torch.autograd.grad((w * scores.logprobs).sum() + 0.7 * (w.square() * scores.entropy).sum(), leaves)


def leaves_of(hidden, head):
    return [hidden, head.weight] + ([] if head.bias is None else [head.bias])


@pytest.mark.parametrize("function", ["matrix", "module"])
def test_hand_number(function):
    # Logits 2 * (1, 0) = (2, 0), of mean 1; at temperature 2: (1, 0). p = e / (e + 1) = 0.731059,
    # H = -sum p log p = 0.582203, log sum p^2 = log(0.534447 + 0.072329) = -0.499595.
    hidden, targets = torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1])
    weight = torch.tensor([[1.0], [0.0]])
    if function == "matrix":
        scores = chunked_logprobs(hidden, targets, Head(weight, scale=2.0), temperature=2.0, want=EVERYTHING)
    else:
        scores = module_logprobs(hidden, targets, lambda x: x @ (2 * weight.t()), temperature=2.0, want=EVERYTHING)
    torch.testing.assert_close(scores.logprobs, torch.tensor([-0.313262, -1.313262]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores.entropy, torch.tensor([0.582203, 0.582203]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores.mean_logit, torch.tensor([1.0, 1.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores.log_collision, torch.tensor([-0.499595, -0.499595]), atol=1e-6, rtol=0)
    assert scores.correct.tolist() == [True, False]
    assert scores.predicted.tolist() == [0, 0]


def test_hand_gradient_is_one_hot_minus_probability():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    scores = chunked_logprobs(hidden, torch.tensor([0]), Head(weight), temperature=1.0, want=())
    scores.logprobs.sum().backward()
    # dlogp/dz = (1 - p, -(1 - p)) with p = 0.731059; dz/dW = 1; dz/dx = (1, 0).
    torch.testing.assert_close(weight.grad, torch.tensor([[0.268941], [-0.268941]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(hidden.grad, torch.tensor([[0.268941]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("keep_bytes", [0, KEPT_BYTES])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 13, 50, None])
@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
def test_equals_log_softmax_of_all_logits_for_any_chunk_size(head_options, chunk_size, keep_bytes):
    hidden, targets, head = make(13, **head_options)
    options = {"chunk_size": chunk_size, "keep_bytes": keep_bytes}
    scores = chunked_logprobs(hidden, targets, head, temperature=0.7, want=EVERYTHING, **options)
    expected = full_scores(hidden, targets, head, 0.7)
    assert_equal_scores(scores, expected)
    leaves = leaves_of(hidden, head)
    for ours, theirs in zip(gradients(scores, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
def test_gradcheck_in_float64(head_options):
    hidden, targets, head = make(5, hidden_size=3, vocab=7, dtype=torch.float64, **head_options)

    def score(hidden, weight, *bias):
        head_of_leaves = Head(weight, bias[0] if bias else None, head.scale, head.softcap)
        scores = chunked_logprobs(hidden, targets, head_of_leaves, temperature=1.3, want=WITH_ENTROPY, chunk_size=2)
        assert scores.logprobs.dtype == torch.float64
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(score, leaves_of(hidden, head))


@pytest.mark.parametrize("name", ["logprobs", "entropy"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("keep_bytes", [0, KEPT_BYTES])
def test_gradient_of_one_output_alone(name, softcap, keep_bytes):
    hidden, targets, head = make(9, bias=True, softcap=softcap)
    options = {"temperature": 1.3, "want": (*WITH_ENTROPY, "correct")}
    scores = chunked_logprobs(hidden, targets, head, **options, chunk_size=4, keep_bytes=keep_bytes)
    expected = full_scores(hidden, targets, head, 1.3)
    weights, leaves = torch.arange(9.0), leaves_of(hidden, head)
    ours = torch.autograd.grad((weights * getattr(scores, name)).sum(), leaves)
    theirs = torch.autograd.grad((weights * getattr(expected, name)).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_bfloat16_scores_are_float32_and_as_precise_as_the_logits():
    hidden, targets, head = make(40, hidden_size=32, vocab=50, bias=True, dtype=torch.bfloat16)
    scores = chunked_logprobs(hidden, targets, head, temperature=0.9, want=EVERYTHING, chunk_size=16)
    exact_head = Head(head.weight.detach().float().requires_grad_(), head.bias.detach().float().requires_grad_())
    exact_hidden = hidden.detach().float().requires_grad_()
    expected = full_scores(exact_hidden, targets, exact_head, 0.9)
    # Logits reach 20, where bfloat16 is spaced by 1/8.
    for name in ("logprobs", "entropy", "mean_logit", "log_collision"):
        assert getattr(scores, name).dtype == torch.float32
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name), atol=0.1, rtol=0)
    # The logits are rounded as in the model's own forward, and nothing after them is.
    rounded = (nn.functional.linear(hidden, head.weight, head.bias).float() / 0.9).log_softmax(1)[range(40), targets]
    torch.testing.assert_close(scores.logprobs, rounded, atol=1e-5, rtol=0)
    ours = gradients(scores, leaves_of(hidden, head))
    theirs = gradients(expected, leaves_of(exact_hidden, exact_head))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() <= 0.03 * b.norm()


def test_weight_gradient_in_bfloat16_does_not_lose_small_terms_over_chunks():
    # Each of 512 rows adds 1/512 to an entry: a sum in bfloat16 stops at 0.5, where its spacing is 1/256.
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    scores = chunked_logprobs(
        hidden,
        torch.zeros(512, dtype=torch.long),
        Head(weight),
        temperature=1.0,
        want=(),
        chunk_size=1,
    )
    scores.logprobs.backward(torch.full((512,), 2.0 / 512))
    assert weight.grad.flatten().tolist() == [1.0, -1.0]


def test_autocast_multiplies_in_its_dtype_and_gives_gradients_in_those_of_the_leaves():
    hidden, targets, head = make(12, hidden_size=32, vocab=50, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = chunked_logprobs(hidden, targets, head, temperature=1.0, want=WITH_ENTROPY, chunk_size=5)
    low = Head(head.weight.detach().bfloat16(), head.bias.detach().bfloat16())
    expected = chunked_logprobs(
        hidden.detach().bfloat16(), targets, low, temperature=1.0, want=("entropy",), chunk_size=5
    )
    torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=0, rtol=0)
    assert [g.dtype for g in gradients(scores, leaves_of(hidden, head))] == [torch.float32] * 3


def test_extreme_logits_stay_finite():
    weight = torch.tensor([[3e4], [0.0], [-3e4]], requires_grad=True)
    hidden = torch.ones(3, 1, requires_grad=True)
    scores = chunked_logprobs(hidden, torch.tensor([0, 1, 2]), Head(weight), temperature=1.0, want=EVERYTHING)
    assert scores.logprobs.tolist() == [0.0, -3e4, -6e4]
    assert scores.entropy.tolist() == scores.mean_logit.tolist() == scores.log_collision.tolist() == [0.0, 0.0, 0.0]
    assert all(g.isfinite().all() for g in gradients(scores, [hidden, weight]))


def test_correct_is_the_argmax_in_ties_too():
    scores = chunked_logprobs(
        torch.ones(2, 1),
        torch.tensor([0, 1]),
        Head(torch.ones(2, 1)),
        temperature=1.0,
        want=("correct",),
    )
    assert scores.correct.tolist() == [True, False]


@pytest.mark.parametrize("head_options", [{}, {"bias": True, "softcap": 2.0}])
def test_empty_batch_has_zero_gradients(head_options):
    hidden, targets, head = make(0, **head_options)
    scores = chunked_logprobs(hidden, targets, head, temperature=1.0, want=EVERYTHING)
    assert all(getattr(scores, name).shape == (0,) for name in ("logprobs", *QUANTITIES))
    for leaf, grad in zip(leaves_of(hidden, head), gradients(scores, leaves_of(hidden, head)), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


class LargestTensor(TorchDispatchMode):
    """Records the largest output of any operator, and the matrix products."""

    def __init__(self):
        super().__init__()
        self.numel = 0
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("function", [chunked_logprobs, module_logprobs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_tokens_by_vocabulary_is_made(function, dtype, softcap):
    keeping = {"keep_bytes": 64 * 96 * 4 - 1} if function is chunked_logprobs else {}
    m, vocab, hidden_size, chunk_size = 64, 96, 4, 8
    hidden, targets, head = make(m, hidden_size=hidden_size, vocab=vocab, softcap=softcap, dtype=dtype)
    with LargestTensor() as largest:
        scores = function(
            hidden,
            targets,
            head if function is chunked_logprobs else (lambda rows: full_logits(rows, head)),
            temperature=0.8,
            want=EVERYTHING,
            chunk_size=chunk_size,
            **keeping,
        )
        gradients(scores, [hidden, head.weight])
    assert largest.numel == max(chunk_size, hidden_size) * vocab
    with LargestTensor() as largest:
        full_scores(hidden, targets, head, 0.8)
    assert largest.numel == m * vocab  # the meter sees such a tensor


@pytest.mark.parametrize("keep_bytes", [0, 12 * 20 * 4])
@pytest.mark.parametrize(
    ("trained", "products_per_chunk"),
    [(("hidden", "weight", "bias"), 3), (("hidden",), 2), (("weight",), 2), (("bias",), 1)],
)
def test_frozen_parts_cost_no_product_and_get_no_gradient(trained, products_per_chunk, keep_bytes):
    hidden, targets, head = make(12, bias=True)
    named = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, leaf in named.items():
        leaf.requires_grad_(name in trained)
    options = {"chunk_size": 4, "keep_bytes": keep_bytes}
    scores = chunked_logprobs(hidden, targets, head, temperature=1.0, want=(*WITH_ENTROPY, "correct"), **options)
    with LargestTensor() as meter:
        scores.logprobs.sum().backward()
    # Logits again, unless probabilities were kept; hidden; weight.
    assert meter.num_products == 3 * (products_per_chunk - (keep_bytes > 0))
    assert {name for name, leaf in named.items() if leaf.grad is not None} == set(trained)


def test_nothing_is_saved_or_differentiated_without_grad():
    hidden, targets, head = make(20)
    with torch.no_grad(), LargestTensor() as largest:
        scores = chunked_logprobs(hidden, targets, head, temperature=1.0, want=(), chunk_size=2)
    assert scores.logprobs.grad_fn is None
    assert largest.numel < 20 * len(head.weight)


def test_kept_probabilities_serve_several_backward_passes():
    hidden, targets, head = make(9)
    scores = chunked_logprobs(hidden, targets, head, temperature=1.3, want=WITH_ENTROPY, chunk_size=4)
    weights, leaves = torch.arange(9.0), leaves_of(hidden, head)
    first, second = (torch.autograd.grad((weights * scores.logprobs).sum(), leaves, retain_graph=True) for _ in "ab")
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    with_entropy = torch.autograd.grad((weights * scores.logprobs).sum() + scores.entropy.sum(), leaves)
    expected = full_scores(hidden, targets, head, 1.3)
    theirs = torch.autograd.grad((weights * expected.logprobs).sum() + expected.entropy.sum(), leaves)
    for a, b in zip(with_entropy, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [chunked_logprobs, module_logprobs])
@pytest.mark.parametrize("name", QUANTITIES)
def test_each_quantity_is_there_if_it_is_wanted_and_changes_no_other(function, name):
    hidden, targets, head = make(9, bias=True, softcap=2.0)

    def scores(want):
        given = head if function is chunked_logprobs else (lambda rows: full_logits(rows, head))
        return function(hidden, targets, given, temperature=0.7, want=want, chunk_size=4)

    alone, every = scores((name,)), scores(EVERYTHING)
    assert alone.wanted.keys() == {name}
    torch.testing.assert_close(getattr(alone, name), getattr(every, name), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(alone.logprobs, every.logprobs, atol=0, rtol=0)


@pytest.mark.parametrize("function", [chunked_logprobs, module_logprobs])
def test_the_entropy_is_a_constant_unless_its_gradient_is_wanted(function):
    hidden, targets, head = make(9)
    given = head if function is chunked_logprobs else (lambda rows: full_logits(rows, head))
    for want, has_gradient in ((("entropy",), False), (WITH_ENTROPY, True)):
        scores = function(hidden, targets, given, temperature=0.7, want=want, chunk_size=4)
        assert scores.entropy.requires_grad is has_gradient
        assert scores.logprobs.requires_grad


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("function", [chunked_logprobs, module_logprobs])
def test_mean_logit_and_log_collision_are_constants(function, softcap):
    hidden, targets, head = make(9, softcap=softcap)
    given = head if function is chunked_logprobs else (lambda rows: full_logits(rows, head))
    scores = function(hidden, targets, given, temperature=0.7, want=("mean_logit", "log_collision"), chunk_size=4)
    assert scores.logprobs.requires_grad
    assert not scores.mean_logit.requires_grad
    assert not scores.log_collision.requires_grad
    # A loss that is weighed by them is differentiated through the log-probs alone.
    loss = (scores.log_collision.exp() * scores.mean_logit * scores.logprobs).sum()
    expected = full_scores(hidden, targets, head, 0.7)
    expected_loss = (expected.log_collision.exp() * expected.mean_logit * expected.logprobs).sum()
    for a, b in zip(
        torch.autograd.grad(loss, [hidden, head.weight]),
        torch.autograd.grad(expected_loss, [hidden, head.weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_log_collision_does_not_underflow_in_a_large_vocabulary():
    # 2^17 equal logits: sum p^2 = 2^-17, of squares of 2^-34 each.
    scores = chunked_logprobs(
        torch.zeros(1, 1), torch.tensor([0]), Head(torch.ones(2**17, 1)), temperature=1.0, want=("log_collision",)
    )
    assert scores.log_collision.item() == pytest.approx(-17 * 0.6931472, abs=1e-4)


def test_inputs_are_left_as_they_were():
    hidden, targets, head = make(9, bias=True, softcap=2.0)
    before = [leaf.detach().clone() for leaf in leaves_of(hidden, head)]
    scores = chunked_logprobs(hidden, targets, head, temperature=0.5, want=(*WITH_ENTROPY, "correct"), chunk_size=4)
    loss = scores.logprobs.sum() + scores.entropy.sum()
    first = torch.autograd.grad(loss, leaves_of(hidden, head), retain_graph=True)
    second = torch.autograd.grad(loss, leaves_of(hidden, head))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for leaf, copy in zip(leaves_of(hidden, head), before, strict=True):
        assert torch.equal(leaf, copy)


class LowRankHead(nn.Module):
    """A head as LoRA makes it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(6, 11)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 11, bias=False)

    def forward(self, rows):
        return self.base(rows) + self.up(self.down(rows))


@pytest.mark.parametrize("chunk_size", [1, 4, 13, None])
def test_module_head_equals_its_merged_matrix(chunk_size):
    hidden, targets, _ = make(13)
    module = LowRankHead()
    merged = Head(module.base.weight + module.up.weight @ module.down.weight, module.base.bias)
    options = {"temperature": 0.7, "want": EVERYTHING}
    scores = module_logprobs(hidden, targets, module, **options, chunk_size=chunk_size)
    expected = full_scores(hidden, targets, merged, 0.7)
    assert_equal_scores(scores, expected)
    leaves = [hidden, module.base.bias, module.down.weight, module.up.weight]
    for a, b in zip(gradients(scores, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_module_head_on_an_empty_batch_has_zero_gradients():
    hidden, targets, _ = make(0)
    module = LowRankHead()
    options = {"temperature": 1.0, "want": ()}
    scores = module_logprobs(hidden, targets, module, **options)
    assert scores.wanted == {}
    with pytest.raises(ValueError, match="entropy was not computed"):
        scores.entropy  # noqa: B018
    scores.logprobs.sum().backward()
    assert torch.equal(module.up.weight.grad, torch.zeros(11, 2))


@pytest.mark.parametrize("function", [chunked_logprobs, module_logprobs])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: needs to be positive"),
        ({"chunk_size": 0}, "chunk_size=0: needs to be >= 1"),
        ({"want": ("entropy", "rank")}, r"want=\['rank'\]: allowed are entropy, entropy_gradient, correct"),
        ({"want": ("entropy_gradient",)}, "'entropy_gradient' is the gradient of 'entropy'. Ask for both"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, r"hidden \(5, 6\), targets \(4,\): need to be \[M, h\] and"),
    ],
)
def test_bad_input_is_refused(function, changes, message):
    hidden, targets, head = make(5)
    arguments = {"targets": targets, "temperature": 1.0, "want": EVERYTHING, "chunk_size": 2} | changes
    arguments |= {"head": head} if function is chunked_logprobs else {"head_fn": nn.Identity()}
    with pytest.raises(ValueError, match=message):
        function(hidden, **arguments)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (Head(torch.zeros(11, 5)), r"head.weight \(11, 5\): needs to be \[V, 6\]"),
        (Head(torch.zeros(11, 6), softcap=0.0), "head.softcap=0.0: needs to be positive"),
    ],
)
def test_bad_head_is_refused(head, message):
    hidden, targets, _ = make(5)
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(hidden, targets, head, temperature=1.0, want=())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [600, 40_000])
@pytest.mark.parametrize("want", [(), ("mean_logit", "log_collision"), (*WITH_ENTROPY, "mean_logit", "log_collision")])
def test_cuda_equals_cpu(vocab, want):
    hidden, targets, head = make(700, hidden_size=64, vocab=vocab, bias=True, softcap=9.0)
    assert default_chunk_size(torch.device("cuda")) < 700
    results = []
    for device in ("cpu", "cuda"):
        moved = [leaf.detach().to(device).requires_grad_() for leaf in leaves_of(hidden, head)]
        scores = chunked_logprobs(
            moved[0],
            targets.to(device),
            Head(moved[1], moved[2], softcap=9.0),
            temperature=0.9,
            want=want,
        )
        grads = gradients(scores, moved) if "entropy" in want else torch.autograd.grad(scores.logprobs.sum(), moved)
        wanted = [getattr(scores, name) for name in want if name != "entropy_gradient"]
        results.append([tensor.detach().cpu() for tensor in (scores.logprobs, *wanted, *grads)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
