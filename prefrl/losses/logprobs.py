"""Log-probs of tokens from hidden states and the output head, with the logits of only one chunk of tokens in memory.

Logits are computed chunk by chunk in one buffer and recomputed in backward, so memory does not grow with the number of
tokens. If the probabilities of all tokens take little memory (`KEPT_BYTES`), they are kept for backward instead, and
with a reference also the gradients of the divergences.
This is for a head that is a matrix; `losses.module_logprobs` takes any head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefrl.losses.kl import compared, mixture
from prefrl.losses.per_token import (
    ScoreName,
    TokenScores,
    WantName,
    check_inputs,
    check_same_shape,
    log_sum_of_squares,
    score_dtype,
)
from prefrl.losses.top_logprobs import ReferenceDistribution, TopGradient, TopLogprobs, ref_log_probs_of
from prefrl.losses.truncation import KeptSet, Mask, TokenTruncation

# Largest size in bytes of the probabilities kept for backward. This is small compared with a model, and keeping them
# saves a quarter of the head's work.
KEPT_BYTES = 128 * 2**20


# The order in which a pass returns what it computes besides log-probs.
COLUMNS: tuple[ScoreName, ...] = ("entropy", "correct", "predicted", "mean_logit", "log_collision", "divergence")


@dataclass(frozen=True, slots=True)
class Head:
    """Logits = cap(scale * (x W^T + b)), with cap(z) = softcap * tanh(z / softcap)."""

    weight: Tensor  # [V, h]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How logits are computed; see `Head` and `chunked_logprobs`."""

    scale: float
    softcap: float | None
    temperature: float
    chunk_size: int
    keep_bytes: int
    dtype: torch.dtype  # of scores, see `score_dtype`
    product_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of rows and their logits."""

    rows: slice
    hidden: Tensor  # [c, h] in the dtype of the product
    weight: Tensor  # [V, h] of the head, in the dtype of the product
    product: Tensor  # [c, V] in the dtype of the product; shares memory with `logits` if the dtypes are equal
    logits: Tensor  # [c, V] in the dtype of scores: cap(scale * z) / temperature; the consumer may overwrite it
    scratch: Tensor  # [c, V] in the dtype of scores; shares memory with `logits` unless `with_scratch`
    probs: Tensor | None  # [c, V] softmax(logits) if it was kept from forward; `logits` is then not filled


def chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: ChunkPlan,
    *,
    with_scratch: bool,
    kept: Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks in order, all in the same buffers, with the logits that `plan` describes."""
    weight, bias = weight.to(plan.product_dtype), None if bias is None else bias.to(plan.product_dtype)
    logits = hidden.new_empty(min(plan.chunk_size, hidden.shape[0]), weight.shape[0], dtype=plan.dtype)
    product = logits if plan.product_dtype == plan.dtype else torch.empty_like(logits, dtype=plan.product_dtype)
    scratch = torch.empty_like(logits) if with_scratch else logits
    for start in range(0, hidden.shape[0], plan.chunk_size):
        rows = slice(start, min(start + plan.chunk_size, hidden.shape[0]))
        n = rows.stop - start
        probs = None if kept is None else kept[rows]
        inputs = hidden[rows].to(plan.product_dtype)
        chunk = Chunk(rows, inputs, weight, product[:n], logits[:n], scratch[:n], probs)
        if probs is None:
            if bias is None:
                torch.mm(inputs, weight.t(), out=chunk.product)
            else:
                torch.addmm(bias, inputs, weight.t(), out=chunk.product)
            if product is not logits:
                chunk.logits.copy_(chunk.product)
            if plan.softcap is not None:
                chunk.logits.mul_(plan.scale / plan.softcap).tanh_().mul_(plan.softcap / plan.temperature)
            elif plan.scale != plan.temperature:
                chunk.logits.mul_(plan.scale / plan.temperature)
        yield chunk


def default_chunk_size(device: torch.device) -> int:
    """Rows of logits held at once: 128 on CPU; 512 elsewhere, since each chunk reads the whole head again."""
    return 128 if device.type == "cpu" else 512


def chunked_logprobs(  # noqa: PLR0913 - what describes the distribution, and how it is computed
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float,
    want: Collection[WantName],
    truncation: TokenTruncation | None = None,
    reference: ReferenceDistribution | None = None,
    chunk_size: int | None = None,
    keep_bytes: int | None = None,
) -> TokenScores:
    """Log-probs of `targets` under softmax(logits / temperature).

    The product with the head runs in autocast's dtype if autocast is on, else in the wider dtype of hidden states and
    weight. Everything after it runs in float32, or in float64 for float64 input. Gradients are computed for `hidden`,
    the weight and the bias, where they require one.

    Args:
        hidden: [M, h], gradient flows.
        targets: [M] int64, token ids in 0 .. V-1.
        head: Output head, gradient flows.
        temperature: Logits are divided by it.
        want: What to compute besides log-probs, by its name in `TokenScores`.
        truncation: Cuts softmax(logits / temperature); None: it is not cut.
        reference: The distribution that `divergence` compares with; None: `divergence` is not computed.
        chunk_size: Rows of logits held at once; None: `default_chunk_size`.
        keep_bytes: If the probabilities of all tokens, and with a reference the gradients of the divergences, take at
            most this many bytes, they are kept for backward instead of recomputing the logits; None: `KEPT_BYTES`.

    Returns:
        Scores of each token.

    Raises:
        ValueError: Shapes do not match, a number is not positive, or `want` has an unknown name.
    """
    chunk_size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    keep_bytes = KEPT_BYTES if keep_bytes is None else keep_bytes
    check_inputs(hidden, targets, temperature, want, chunk_size)
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"head.weight {tuple(head.weight.shape)}: needs to be [V, {hidden.shape[1]}] to match hidden")
    if head.softcap is not None and head.softcap <= 0:
        raise ValueError(f"head.softcap={head.softcap}: needs to be positive, or None for no cap")
    product_dtype = torch.promote_types(hidden.dtype, head.weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        product_dtype = torch.get_autocast_dtype(hidden.device.type)
    is_penalized = truncation is not None and truncation.history is not None
    is_top = isinstance(reference, TopLogprobs)
    plan = ChunkPlan(
        scale=head.scale,
        softcap=head.softcap,
        temperature=temperature,
        chunk_size=chunk_size,
        # Gradients of penalized logits and of likely tokens need the logits: kept probabilities would be of no use.
        keep_bytes=keep_bytes if torch.is_grad_enabled() and not (is_penalized or is_top) else 0,
        dtype=score_dtype(hidden),
        product_dtype=product_dtype,
    )
    wanted = _Wanted(frozenset(want), truncation=truncation)
    if reference is not None:
        wanted = replace(
            wanted,
            ref_log_probs=ref_log_probs_of(reference, hidden, temperature, truncation, plan.dtype),
            top=reference if isinstance(reference, TopLogprobs) else None,
            beta=reference.beta,
        )
    logprobs, *columns = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, plan, wanted
    )
    found = dict(zip(COLUMNS, columns, strict=True))
    return TokenScores.of(logprobs, **found, hidden=hidden if "hidden" in want else None)


def _mean_logit(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[M] mean of scale * (x W^T + b) over the vocabulary: scale * (x . mean W + mean b)."""
    dtype = score_dtype(hidden)
    mean: Tensor = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
    if bias is not None:
        mean += bias.mean(dtype=dtype)
    return mean * scale


@dataclass(frozen=True, slots=True)
class _Wanted:
    names: frozenset[WantName]
    truncation: TokenTruncation | None
    ref_log_probs: Callable[[slice, Mask | None], Tensor] | None = None  # [c, V] log q of some rows
    top: TopLogprobs | None = None  # of the reference, if that is all that is known of it
    beta: float = 1.0  # which divergence, see `losses.kl.divergence`

    def log_other(self, rows: slice, mask: Mask | None, logits: Tensor) -> Tensor | None:
        """[c, V] log q of some rows; log m with 0 < beta < 1, where m also depends on their logits [c, V]."""
        if self.ref_log_probs is None:
            return None
        log_ref = self.ref_log_probs(rows, mask)
        return mixture(logits.log_softmax(1), log_ref, beta=self.beta) if 0 < self.beta < 1 else log_ref

    def top_gradient(self, rows: slice, mask: Mask | None, logits: Tensor, grad: Tensor | None) -> TopGradient | None:
        """Of the divergence from likely tokens, if the loss depends on it."""
        return None if self.top is None or grad is None else self.top[rows].gradient(logits, mask, grad[rows])


class _ChunkedLogprobs(torch.autograd.Function):
    """Formulas for each row, with z = logits / temperature, p = softmax(z), t the target and q the reference's p:

    log p_t = z_t - log sum exp z        d log p_t / d z_j = [j = t] - p_j
    H = log sum exp z - sum p z          d H / d z_j = -p_j (log p_j + H) = p_j (sum p z - z_j)
    KL = sum p (log p - log q)           d KL / d z_j = p_j (z_j - log q_j - sum p (z - log q))

    For the other divergences see `losses.kl`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: ChunkPlan,
        wanted: _Wanted,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        kept = slopes = None
        compares = wanted.ref_log_probs is not None
        # The gradient of a capped logit needs more than its probability.
        num_kept = (1 + compares) * len(hidden) * len(weight)
        if plan.softcap is None and num_kept * plan.dtype.itemsize <= plan.keep_bytes:
            kept = hidden.new_empty(len(hidden), len(weight), dtype=plan.dtype)
            slopes = torch.empty_like(kept) if compares else None
        columns = _Columns.empty(hidden, targets, plan.dtype, wanted, slopes)
        with torch.autocast(hidden.device.type, enabled=False):
            # Divergence and entropy need the logits and the probabilities at the same time.
            with_scratch = kept is None and (columns.entropy is not None or columns.divergence is not None)
            for chunk in chunks(hidden, weight, bias, plan, with_scratch=with_scratch):
                columns.fill(
                    chunk, targets[chunk.rows], chunk.scratch if kept is None else kept[chunk.rows], plan, wanted
                )
            mean_logit = columns.mean_logit
            if mean_logit is not None and plan.softcap is None:
                mean_logit = _mean_logit(hidden, weight, bias, plan.scale)
        entropy = None if "entropy_gradient" in wanted.names else columns.entropy
        constants = (entropy, columns.correct, columns.predicted, mean_logit, columns.log_collision)
        ctx.mark_non_differentiable(*(column for column in constants if column is not None))
        ctx.plan, ctx.wanted = plan, wanted
        sets = (None, None) if columns.kept is None else (columns.kept.lowest, columns.kept.log_share)
        ctx.save_for_backward(
            hidden, weight, bias, targets, columns.expected_logits, columns.expected_differences, kept, slopes, *sets
        )
        return (
            columns.logprobs,
            columns.entropy,
            columns.correct,
            columns.predicted,
            mean_logit,
            columns.log_collision,
            columns.divergence,
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets, expected_logits, expected_differences, kept, slopes, *sets = ctx.saved_tensors
        kept_set = None if sets[0] is None else KeptSet(*sets)
        plan: ChunkPlan = ctx.plan
        wanted: _Wanted = ctx.wanted
        dtype = plan.dtype
        grad_hidden, grad_weight, grad_bias = (
            # Sums over tokens are accumulated in the dtype of scores, so that the number of chunks does not matter.
            torch.zeros_like(tensor, dtype=dtype) if is_needed else None
            for tensor, is_needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        grads = _RowGrads.of(
            hidden.new_zeros(hidden.shape[0], dtype=dtype) if grad_logprobs is None else grad_logprobs,
            (grad_entropy, expected_logits),
            (others[-1], expected_differences),
            wanted,
            slopes,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            with_scratch = grads.logits is not None or grads.top is not None
            if with_scratch:
                kept = None  # what was kept is not enough
            for chunk in chunks(hidden, weight, bias, plan, with_scratch=with_scratch, kept=kept):
                rows = chunk.rows
                _logits_to_grad(chunk, targets[rows], grads, plan, wanted, kept_set)
                if grad_bias is not None:
                    grad_bias += chunk.logits.sum(0)
                if chunk.product.dtype != dtype:
                    chunk.product.copy_(chunk.logits)
                if grad_hidden is not None:
                    grad_hidden[rows] = chunk.product @ chunk.weight
                if grad_weight is not None and plan.product_dtype == dtype:
                    grad_weight.addmm_(chunk.product.t(), chunk.hidden)
                elif grad_weight is not None:
                    grad_weight += chunk.product.t() @ chunk.hidden
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _Columns:
    """[M] results, filled chunk by chunk; None if not wanted."""

    logprobs: Tensor
    entropy: Tensor | None
    expected_logits: Tensor | None  # sum p z, for the gradient of entropy
    correct: Tensor | None
    predicted: Tensor | None
    mean_logit: Tensor | None
    log_collision: Tensor | None
    divergence: Tensor | None
    expected_differences: Tensor | None  # sum p (z - log q), with m for q in between; for the gradient of divergence
    kept: KeptSet | None  # of a truncation, for the gradient
    slopes: Tensor | None  # [M, V] gradients of divergences with respect to logits, if they are kept

    @classmethod
    def empty(
        cls, hidden: Tensor, targets: Tensor, dtype: torch.dtype, wanted: _Wanted, slopes: Tensor | None
    ) -> Self:
        want, is_whole = wanted.names, wanted.ref_log_probs is not None
        column = partial(hidden.new_empty, hidden.shape[0], dtype=dtype)
        return cls(
            logprobs=column(),
            entropy=column() if "entropy" in want else None,
            expected_logits=column() if "entropy" in want else None,
            correct=torch.empty_like(targets, dtype=torch.bool) if "correct" in want else None,
            predicted=torch.empty_like(targets) if "predicted" in want else None,
            mean_logit=column() if "mean_logit" in want else None,
            log_collision=column() if "log_collision" in want else None,
            divergence=column() if is_whole or wanted.top is not None else None,
            expected_differences=column() if is_whole and wanted.beta > 0 else None,
            kept=None if wanted.truncation is None else wanted.truncation.empty(hidden, dtype),
            slopes=slopes,
        )

    def fill(self, chunk: Chunk, targets: Tensor, room: Tensor, plan: ChunkPlan, wanted: _Wanted) -> None:
        """Fill the rows of a chunk. Its probabilities are written to `room`; its logits are overwritten."""
        rows, logits = chunk.rows, chunk.logits
        if self.correct is not None:
            self.correct[rows] = logits.argmax(1) == targets
        if self.predicted is not None:
            self.predicted[rows] = logits.argmax(1)
        if self.mean_logit is not None and plan.softcap is not None:
            self.mean_logit[rows] = logits.mean(1) * plan.temperature
        mask = None
        if wanted.truncation is None:
            target_logits = logits.gather(1, targets[:, None]).squeeze(1)
        else:
            target_logits, mask = self._truncate(logits, targets, rows, wanted.truncation)
        largest = logits.amax(1)
        probs = torch.softmax(logits, 1, out=room)
        # From p = exp(z - log sum exp z) at the largest logit, where p >= 1 / V cannot underflow.
        log_normalizers = largest - probs.amax(1).log()
        self.logprobs[rows] = target_logits - log_normalizers
        if self.log_collision is not None:
            self.log_collision[rows] = log_sum_of_squares(probs)
        if self.divergence is not None and wanted.top is not None:
            self.divergence[rows] = wanted.top[rows].divergence(logits, mask)
        elif self.divergence is not None and wanted.ref_log_probs is not None:
            log_ref = wanted.ref_log_probs(rows, mask)
            check_same_shape(logits=logits, reference_logits=log_ref)
            slopes = None if self.slopes is None else self.slopes[rows]
            values, differences = compared(logits, log_normalizers, probs, log_ref, beta=wanted.beta, slopes=slopes)
            self.divergence[rows] = values
            if self.expected_differences is not None and differences is not None:
                self.expected_differences[rows] = differences
        if self.entropy is not None and self.expected_logits is not None:
            self.expected_logits[rows] = logits.mul_(probs).sum(1)
            self.entropy[rows] = log_normalizers - self.expected_logits[rows]

    def _truncate(
        self, logits: Tensor, targets: Tensor, rows: slice, truncation: TokenTruncation
    ) -> tuple[Tensor, Mask | None]:
        """Truncate the chunk's logits, in place. Returns the targets' logits [c] after the penalty, and S."""
        penalties = truncation[rows].penalties(logits)
        if penalties is not None:
            logits.mul_(penalties)
        target_logits, mask = logits.gather(1, targets[:, None]).squeeze(1), None
        if self.kept is not None:
            kept = truncation.kept(logits)
            assert kept is not None
            self.kept[rows], mask = kept, kept.mask(logits, targets)
            mask.restrict(logits)
        return target_logits, mask


_Grad = tuple[Tensor | None, Tensor]  # the gradient of a result, and the expectation in its formula


@dataclass(frozen=True, slots=True)
class _RowGrads:
    """Coefficients of d loss / d z_j: p_j (logits z_j - differences log q_j + offsets) + [j = t] logprobs - probs q_j.

    In a divergence with 0 < beta < 1, log m stands for log q.
    """

    logprobs: Tensor  # [M]
    offsets: Tensor  # [M]
    logits: Tensor | None  # [M]; None: 0
    differences: Tensor | None  # [M]; None: 0
    probs: Tensor | None  # [M]; None: 0
    top: Tensor | None  # [M] of the divergence from likely tokens, whose gradient is added; None: 0
    kept: tuple[Tensor, Tensor] | None = None  # [M, V] gradients that are added, with factors [M]

    @classmethod
    def of(cls, logprobs: Tensor, entropy: _Grad, divergence: _Grad, wanted: _Wanted, slopes: Tensor | None) -> Self:
        """From the gradients of the results; `slopes` are those of divergences, if they were kept."""
        (grad_entropy, expected_logits), (grad_divergence, expected_differences) = entropy, divergence
        offsets, logits, grad_kl, grad_probs, beta = -logprobs, None, None, None, wanted.beta
        if grad_entropy is not None:
            offsets, logits = offsets + grad_entropy * expected_logits, -grad_entropy
        if slopes is not None and grad_divergence is not None:
            return cls(logprobs, offsets, logits, None, None, None, kept=(slopes, grad_divergence))
        if wanted.top is not None:
            return cls(logprobs, offsets, logits, None, None, grad_divergence)
        if grad_divergence is not None and beta == 0:
            offsets, grad_probs = offsets + grad_divergence, grad_divergence
        elif grad_divergence is not None:
            grad_kl = grad_divergence if beta == 1 else grad_divergence * (1 - beta)
            offsets = offsets - grad_kl * expected_differences
            logits = grad_kl if logits is None else logits + grad_kl
        return cls(logprobs, offsets, logits, grad_kl, grad_probs, None)


def _logits_to_grad(
    chunk: Chunk, targets: Tensor, grads: _RowGrads, plan: ChunkPlan, wanted: _Wanted, kept: KeptSet | None
) -> None:
    """Replace the chunk's logits by the gradient with respect to z, before scale, cap and temperature."""
    logits, rows = chunk.logits, chunk.rows
    slope = None if plan.softcap is None else 1 - (logits * (plan.temperature / plan.softcap)).square_()
    penalties, mask = None, None
    if chunk.probs is None:  # kept probabilities are truncated already, and without a penalty
        penalties = None if wanted.truncation is None else wanted.truncation[rows].penalties(logits)
        if penalties is not None:
            logits.mul_(penalties)
        if kept is not None:
            mask = kept[rows].mask(logits, targets)
            mask.restrict(logits)
    compares = grads.differences is not None or grads.probs is not None
    log_other = wanted.log_other(rows, mask, logits) if compares else None
    top = None if wanted.top is None else wanted.top_gradient(rows, mask, logits, grads.top)
    probs = torch.softmax(logits, 1, out=chunk.scratch) if chunk.probs is None else chunk.probs
    if grads.logits is None:
        torch.mul(probs, grads.offsets[rows, None], out=logits)
    else:
        logits.mul_(grads.logits[rows, None])
        if grads.differences is not None and log_other is not None:
            logits.addcmul_(log_other, grads.differences[rows, None], value=-1)
        logits.add_(grads.offsets[rows, None]).mul_(probs)
    if grads.kept is not None:
        logits.addcmul_(grads.kept[0][rows], grads.kept[1][rows, None])
    elif grads.probs is not None and log_other is not None:
        logits.addcmul_(log_other.exp_(), grads.probs[rows, None], value=-1)
    elif top is not None:
        top.add_to(logits, probs)
    logits.scatter_add_(1, targets[:, None], grads.logprobs[rows, None])
    scale = None if plan.scale == plan.temperature else plan.scale / plan.temperature
    for factor in [each for each in (penalties, slope, scale) if each is not None]:
        logits.mul_(factor)
