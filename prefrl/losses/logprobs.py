"""Log-probs of tokens from hidden states and the output head, without logits for more than a chunk of tokens.

Logits are made chunk by chunk in one buffer and made again in backward, so memory does not grow with the number of
tokens; where the probabilities of all tokens are small beside any model, they are kept for backward instead.
`chunked_logprobs` is for a head that is a matrix; `module_logprobs` takes any head, at the price of a few more buffers
of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KEPT_BYTES",
    "Head",
    "TokenScores",
    "WantName",
    "chunked_logprobs",
    "default_chunk_size",
    "module_logprobs",
]

# What can be computed beside log-probs: the optional fields of TokenScores.
WantName = Literal["entropy", "correct", "mean_logit", "log_collision"]

# Bytes of probabilities that may be kept for backward: little beside a model, and a quarter of the head's work.
KEPT_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Head:
    """Logits = cap(scale * (x W^T + b)), with cap(z) = softcap * tanh(z / softcap)."""

    weight: Tensor  # [V, h]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What is known about each token; in float32, or float64 if the hidden states are. What is not wanted is None.

    p is the distribution that is scored: softmax(logits / temperature).
    """

    logprobs: Tensor  # [M] nats, gradient flows
    entropy: Tensor | None = None  # [M] nats, -sum p log p, gradient flows
    correct: Tensor | None = None  # [M] bool: the token is the most likely one
    mean_logit: Tensor | None = None  # [M] mean over the vocabulary of the logits before temperature, constant
    log_collision: Tensor | None = None  # [M] nats, log sum p^2, constant


def default_chunk_size(device: torch.device) -> int:
    """Rows of logits that are held at once: 128 on CPU; 512 elsewhere, where each chunk reads the whole head again."""
    return 128 if device.type == "cpu" else 512


def chunked_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float,
    want: Collection[WantName],
    chunk_size: int | None = None,
    keep_bytes: int | None = None,
) -> TokenScores:
    """Log-probs of `targets` under softmax(logits / temperature).

    The product with the head runs in the dtype of autocast, if it is on, else in the wider one of hidden states and
    weight; all that follows runs in float32, or float64 for float64. Gradients are computed for those of `hidden`, the
    weight and the bias that want one.

    Args:
        hidden: [M, h], gradient flows.
        targets: [M] int64, token ids in 0 .. V-1.
        head: Output head, gradient flows.
        temperature: Logits are divided by it.
        want: What to compute beside log-probs, by its name in `TokenScores`.
        chunk_size: Rows of logits held at once; None: `default_chunk_size`.
        keep_bytes: If the probabilities of all tokens are at most so large, they are kept for backward, instead of
            logits being made again; None: `KEPT_BYTES`.

    Returns:
        Scores of each token.

    Raises:
        ValueError: Shapes that do not fit, a number that is not positive, or an unknown name in `want`.
    """
    chunk_size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    keep_bytes = KEPT_BYTES if keep_bytes is None else keep_bytes
    _check(hidden, targets, temperature, want, chunk_size)
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"head.weight {tuple(head.weight.shape)}: needs to be [V, {hidden.shape[1]}], as hidden is")
    if head.softcap is not None and head.softcap <= 0:
        raise ValueError(f"head.softcap={head.softcap}: needs to be positive, or None for no cap")
    plan = _Plan(
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        want=frozenset(want),
        chunk_size=chunk_size,
        keep_bytes=keep_bytes if torch.is_grad_enabled() else 0,
        product_dtype=_product_dtype(hidden, head.weight),
    )
    scores = _ChunkedLogprobs.apply(hidden, head.weight, head.bias, targets, plan)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


def _mean_logit(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[M] mean of scale * (x W^T + b) over the vocabulary: scale * (x . mean W + mean b)."""
    dtype = _score_dtype(hidden)
    mean: Tensor = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
    if bias is not None:
        mean += bias.mean(dtype=dtype)
    return mean * scale


def module_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head_fn: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    want: Collection[WantName],
    chunk_size: int | None = None,
) -> TokenScores:
    """`chunked_logprobs` for a head that is no plain matrix: with LoRA, quantised, or of a user's own making.

    Each chunk is checkpointed: its logits are made again in backward, and autograd differentiates through `head_fn`.

    Args:
        hidden: [M, h], gradient flows.
        targets: [M] int64, token ids in 0 .. V-1.
        head_fn: [m, h] -> [m, V] logits as the model's own forward makes them; gradient flows to its parameters.
        temperature: Logits are divided by it.
        want: What to compute beside log-probs, by its name in `TokenScores`.
        chunk_size: Rows of logits held at once; None: `default_chunk_size`.

    Returns:
        Scores of each token.

    Raises:
        ValueError: Shapes that do not fit, a number that is not positive, or an unknown name in `want`.
    """
    chunk_size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    _check(hidden, targets, temperature, want, chunk_size)

    def score(rows: Tensor, row_targets: Tensor) -> tuple[Tensor | None, ...]:
        logits = head_fn(rows)
        logits = logits.to(_score_dtype(logits))
        log_probs = (logits / temperature).log_softmax(1)
        constant = log_probs.detach()
        return (
            log_probs.gather(1, row_targets[:, None]).squeeze(1),
            -(log_probs.exp() * log_probs).sum(1) if "entropy" in want else None,
            logits.argmax(1) == row_targets if "correct" in want else None,
            logits.detach().mean(1) if "mean_logit" in want else None,
            _log_sum_of_squares(constant.exp()) if "log_collision" in want else None,
        )

    # An empty batch is split into one empty chunk, so that the head's parameters get a gradient, of zeros.
    parts = [
        checkpoint(score, rows, row_targets, use_reentrant=False)
        for rows, row_targets in zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
    ]
    columns = zip(*parts, strict=True)
    logprobs, *wanted = (None if column[0] is None else torch.cat(column) for column in columns)
    assert logprobs is not None
    return TokenScores(logprobs, *wanted)


def _log_sum_of_squares(probs: Tensor) -> Tensor:
    """[c] log sum p^2 from [c, V], without another tensor of that size. The sum is at least 1 / V: no underflow."""
    norms: Tensor = torch.linalg.vector_norm(probs, dim=1)
    return norms.log() * 2


def _slices(num_rows: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_rows)) for start in range(0, num_rows, chunk_size)]


def _check(hidden: Tensor, targets: Tensor, temperature: float, want: Collection[WantName], chunk_size: int) -> None:
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}: need to be [M, h] and [M]")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: needs to be positive")
    unknown = set(want) - set(get_args(WantName))
    if unknown:
        raise ValueError(f"want={sorted(unknown)}: allowed are {', '.join(get_args(WantName))}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: needs to be >= 1")


def _score_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden.dtype, weight.dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    scale: float
    softcap: float | None
    temperature: float
    want: frozenset[WantName]
    chunk_size: int
    keep_bytes: int
    product_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    hidden: Tensor  # [c, h] in the dtype of the product
    product: Tensor  # [c, V] in the dtype of the product; the memory of `logits` if that is the same dtype
    logits: Tensor  # [c, V] in the dtype of scores, after `_transform`; whoever reads it may overwrite it
    scratch: Tensor  # [c, V] in the dtype of scores; the memory of `logits` unless asked for
    probs: Tensor | None  # [c, V] softmax(logits) if it was kept: `logits` is not filled then


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: _Plan,
    *,
    with_scratch: bool,
    kept: Tensor | None = None,
) -> Iterator[_Chunk]:
    """Chunks in order, all in the same buffers. `weight` and `bias` are in the dtype of the product."""
    dtype = _score_dtype(hidden)
    logits = hidden.new_empty(min(plan.chunk_size, hidden.shape[0]), weight.shape[0], dtype=dtype)
    product = logits if plan.product_dtype == dtype else torch.empty_like(logits, dtype=plan.product_dtype)
    scratch = torch.empty_like(logits) if with_scratch else logits
    for rows in _slices(hidden.shape[0], plan.chunk_size):
        n = rows.stop - rows.start
        probs = None if kept is None else kept[rows]
        chunk = _Chunk(rows, hidden[rows].to(plan.product_dtype), product[:n], logits[:n], scratch[:n], probs)
        if probs is None:
            _fill(chunk, weight, bias, plan)
        yield chunk


def _fill(chunk: _Chunk, weight: Tensor, bias: Tensor | None, plan: _Plan) -> None:
    """Make the chunk's logits."""
    if bias is None:
        torch.mm(chunk.hidden, weight.t(), out=chunk.product)
    else:
        torch.addmm(bias, chunk.hidden, weight.t(), out=chunk.product)
    if chunk.product.dtype != chunk.logits.dtype:
        chunk.logits.copy_(chunk.product)
    _transform(chunk.logits, plan)


def _room_for_probs(hidden: Tensor, weight: Tensor, plan: _Plan) -> Tensor | None:
    """[M, V] if that is small. The gradient of a capped logit is not made of its probability alone."""
    dtype = _score_dtype(hidden)
    if plan.softcap is not None or len(hidden) * len(weight) * dtype.itemsize > plan.keep_bytes:
        return None
    return hidden.new_empty(len(hidden), len(weight), dtype=dtype)


def _transform(logits: Tensor, plan: _Plan) -> None:
    """cap(scale * z) / temperature, in place."""
    if plan.softcap is not None:
        logits.mul_(plan.scale / plan.softcap).tanh_().mul_(plan.softcap / plan.temperature)
    elif plan.scale != plan.temperature:
        logits.mul_(plan.scale / plan.temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z) and t the target, in each row:

    log p_t = z_t - log sum exp z        d log p_t / d z_j = [j = t] - p_j
    H = log sum exp z - sum p z          d H / d z_j = -p_j (log p_j + H) = p_j (sum p z - z_j)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        want = plan.want
        logprobs = hidden.new_empty(hidden.shape[0], dtype=_score_dtype(hidden))
        entropy = torch.empty_like(logprobs) if "entropy" in want else None
        expected_logits = torch.empty_like(logprobs) if "entropy" in want else None  # sum p z
        correct = torch.empty_like(targets, dtype=torch.bool) if "correct" in want else None
        mean_logit = torch.empty_like(logprobs) if "mean_logit" in want else None
        log_collision = torch.empty_like(logprobs) if "log_collision" in want else None
        kept = _room_for_probs(hidden, weight, plan)
        with torch.autocast(hidden.device.type, enabled=False):
            product_weight, product_bias = _in_product_dtype(weight, bias, plan)
            with_scratch = "entropy" in want and kept is None
            for chunk in _chunks(hidden, product_weight, product_bias, plan, with_scratch=with_scratch):
                rows, logits = chunk.rows, chunk.logits
                target_logits = logits.gather(1, targets[rows, None]).squeeze(1)
                if correct is not None:
                    correct[rows] = logits.argmax(1) == targets[rows]
                if mean_logit is not None and plan.softcap is not None:
                    mean_logit[rows] = logits.mean(1) * plan.temperature
                largest = logits.amax(1)
                probs = torch.softmax(logits, 1, out=chunk.scratch if kept is None else kept[rows])
                # p = exp(z - log sum exp z) at the largest logit, where it cannot underflow: p >= 1 / V.
                log_normalizers = largest - probs.amax(1).log()
                logprobs[rows] = target_logits - log_normalizers
                if log_collision is not None:
                    log_collision[rows] = _log_sum_of_squares(probs)
                if entropy is not None and expected_logits is not None:
                    expected_logits[rows] = logits.mul_(probs).sum(1)
                    entropy[rows] = log_normalizers - expected_logits[rows]
            if mean_logit is not None and plan.softcap is None:
                mean_logit = _mean_logit(hidden, weight, bias, plan.scale)
        ctx.mark_non_differentiable(*(x for x in (correct, mean_logit, log_collision) if x is not None))
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, targets, expected_logits, kept)
        return logprobs, entropy, correct, mean_logit, log_collision

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, expected_logits, kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dtype = _score_dtype(hidden)
        grad_hidden, grad_weight, grad_bias = (
            # Sums over tokens: kept in the dtype of scores however many chunks there are.
            torch.zeros_like(tensor, dtype=dtype) if is_needed else None
            for tensor, is_needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        if grad_logprobs is None:
            grad_logprobs = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        offsets = -grad_logprobs if grad_entropy is None else grad_entropy * expected_logits - grad_logprobs
        with torch.autocast(hidden.device.type, enabled=False):
            product_weight, product_bias = _in_product_dtype(weight, bias, plan)
            if grad_entropy is not None:
                kept = None  # its gradient reads the logits
            with_scratch = grad_entropy is not None
            for chunk in _chunks(hidden, product_weight, product_bias, plan, with_scratch=with_scratch, kept=kept):
                rows = chunk.rows
                grads = _RowGrads(
                    grad_logprobs[rows], offsets[rows], None if grad_entropy is None else grad_entropy[rows]
                )
                _logits_to_grad(chunk, targets[rows], grads, plan)
                if grad_bias is not None:
                    grad_bias += chunk.logits.sum(0)
                if chunk.product.dtype != dtype:
                    chunk.product.copy_(chunk.logits)
                if grad_hidden is not None:
                    grad_hidden[rows] = chunk.product @ product_weight
                if grad_weight is not None:
                    _add_product(grad_weight, chunk.product.t(), chunk.hidden)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _in_product_dtype(weight: Tensor, bias: Tensor | None, plan: _Plan) -> tuple[Tensor, Tensor | None]:
    return weight.to(plan.product_dtype), None if bias is None else bias.to(plan.product_dtype)


@dataclass(frozen=True, slots=True)
class _RowGrads:
    logprobs: Tensor  # [c]
    offsets: Tensor  # [c], entropy * sum p z - logprobs
    entropy: Tensor | None  # [c]


def _logits_to_grad(chunk: _Chunk, targets: Tensor, grads: _RowGrads, plan: _Plan) -> None:
    """Replace the chunk's logits by the gradient of what they were before `_transform`."""
    logits = chunk.logits
    slope = None if plan.softcap is None else 1 - (logits * (plan.temperature / plan.softcap)).square_()
    probs = torch.softmax(logits, 1, out=chunk.scratch) if chunk.probs is None else chunk.probs
    if grads.entropy is None:
        torch.mul(probs, grads.offsets[:, None], out=logits)
    else:
        logits.mul_(-grads.entropy[:, None]).add_(grads.offsets[:, None]).mul_(probs)
    logits.scatter_add_(1, targets[:, None], grads.logprobs[:, None])
    if slope is not None:
        logits.mul_(slope)
    if plan.scale != plan.temperature:
        logits.mul_(plan.scale / plan.temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a total that may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
