"""Log-probs of tokens from hidden states and any head, with the logits of only one chunk of tokens in memory.

Unlike `losses.logprobs`, which knows the gradient of a matrix, it lets autograd differentiate, at the price of a few
more buffers of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prefrl.losses.kl import divergence
from prefrl.losses.logprobs import COLUMNS, default_chunk_size
from prefrl.losses.per_token import TokenScores, WantName, check_inputs, log_sum_of_squares, score_dtype
from prefrl.losses.top_logprobs import ReferenceDistribution, TopLogprobs, ref_log_probs_of
from prefrl.losses.truncation import TokenTruncation


def num_chunks_of(hidden: Tensor) -> int:
    """Number of times that `module_logprobs` calls the head for hidden states [M, h]."""
    return max(-(-hidden.shape[0] // default_chunk_size(hidden.device)), 1)


def module_logprobs(  # noqa: PLR0913 - what describes the distribution, and how it is computed
    hidden: Tensor,
    targets: Tensor,
    head_fn: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    want: Collection[WantName],
    truncation: TokenTruncation | None = None,
    reference: ReferenceDistribution | None = None,
    chunk_size: int | None = None,
    min_chunks: int = 1,
) -> TokenScores:
    """`chunked_logprobs` for a head that is not a plain matrix: with LoRA, quantized, or a custom module.

    Each chunk is checkpointed: its logits are recomputed in backward, and autograd differentiates through `head_fn`.
    Instead of a matrix, `head_fn` maps [m, h] to [m, V] logits as the model's own forward computes them; gradient
    flows to its parameters. It is called at least `min_chunks` times, on empty chunks if need be.
    """
    chunk_size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    check_inputs(hidden, targets, temperature, want, chunk_size)
    ref_log_probs = None
    if reference is not None:
        ref_log_probs = ref_log_probs_of(reference, hidden, temperature, truncation, score_dtype(hidden))

    def score(rows: slice) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        row_targets = targets[rows]
        logits = head_fn(hidden[rows])
        logits = logits.to(score_dtype(logits))
        scaled, mask = logits / temperature, None
        if truncation is not None:
            penalties = truncation[rows].penalties(scaled)
            scaled = scaled if penalties is None else scaled * penalties
            kept = truncation.kept(scaled.detach())
            mask = None if kept is None else kept.mask(scaled.detach(), row_targets)
        restricted = scaled if mask is None else mask.restrict(scaled.clone())
        log_normalizers = restricted.logsumexp(1, keepdim=True)
        log_probs = restricted - log_normalizers
        constant = log_probs.detach()
        of_reference = None
        if isinstance(reference, TopLogprobs):
            of_reference = reference[rows].divergence(restricted, mask)
        elif reference is not None and ref_log_probs is not None:
            of_reference = divergence(log_probs, ref_log_probs(rows, mask), beta=reference.beta)
        columns = (
            _entropy(log_probs if "entropy_gradient" in want else constant) if "entropy" in want else None,
            logits.argmax(1) == row_targets if "correct" in want else None,
            logits.argmax(1) if "predicted" in want else None,
            logits.detach().mean(1) if "mean_logit" in want else None,
            log_sum_of_squares(constant.exp()) if "log_collision" in want else None,
            of_reference,
        )
        return (scaled.gather(1, row_targets[:, None]) - log_normalizers).squeeze(1), columns

    # Empty chunks call the head too, so that its parameters get a gradient of zeros.
    slices = [slice(start, start + chunk_size) for start in range(0, hidden.shape[0], chunk_size)]
    slices += [slice(0, 0)] * (min_chunks - len(slices))
    parts = [checkpoint(score, rows, use_reentrant=False) for rows in slices]
    columns = zip(*(found for _, found in parts), strict=True)
    found = {n: None if of[0] is None else torch.cat(of) for n, of in zip(COLUMNS, columns, strict=True)}
    logprobs = torch.cat([logprobs for logprobs, _ in parts])
    return TokenScores.of(logprobs, **found, hidden=hidden if "hidden" in want else None)


def _entropy(log_probs: Tensor) -> Tensor:
    """[c] from [c, V]."""
    return -(log_probs.exp() * log_probs).sum(1)
