"""The distribution that a sampler with top_k, top_p, min_p or a repetition penalty draws from.

From logits z of a token's place, already divided by the temperature:

    1. z_j <- z_j / penalty if z_j > 0, z_j * penalty otherwise, for each token j of the text before the place
    2. S = {j: z_j >= max z + log min_p},  then those of S among its top_k largest,  then the fewest of the largest
       of these with at least top_p of their probability
    3. pi(j) = exp(z_j) / Z for j in S, 0 otherwise;  Z = sum over S of exp(z_j)

This is vLLM's order, in which local generation samples, too. The log-prob of a sampled token y is z_y - log Z. Its
gradient treats S as a constant: it is that of the truncated policy wherever a small step does not change S.

A token that one policy sampled may be outside the S of another: of a reference, of a policy that has learned since, or
of one that rounds differently. It then counts as one of S: Z = exp(z_y) + sum over S of exp(z_j). Log-probs and ratios
are finite, and a token that leaves S by a hair changes its ratio little.

Shape letters: M tokens, c of them in a chunk, V vocabulary, W the longest text of R responses, prompts included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@contextmanager
def cumsum_permitted() -> Iterator[None]:
    """Context in which deterministic mode lets CUDA sum cumulatively: torch warns instead of an error.

    It has no deterministic algorithm for this, see `torch.use_deterministic_algorithms`. What may differ is the order
    in which the probabilities of tokens are added.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=is_lenient)


# Logit of tokens outside S. Finite, so that its product with a probability of 0 is 0.
FLOOR = -1e20
# Largest logits that are sorted at first. With few tokens in S, no more are needed.
_SORTED = 512
# Logits that fit in a CPU's caches.
_CACHED = 2**20


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a sampler cuts a distribution; the defaults cut nothing."""

    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_whole(self) -> bool:
        """Whether S is the whole vocabulary."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The texts that M tokens follow."""

    ids: Tensor  # [R, W] int64, context and response, padded with anything
    response: Tensor  # [M] int64
    length: Tensor  # [M] int64, >= 1: number of tokens before the token

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(self.ids, self.response[rows], self.length[rows])

    def tokens(self) -> Tensor:
        """[c, W] the ids before each token; the others are replaced by the first, which is before all of them."""
        ids = self.ids[self.response]
        is_before = torch.arange(ids.size(1), device=ids.device) < self.length[:, None]
        return ids.where(is_before, ids[:, :1])


@dataclass(frozen=True, slots=True)
class Mask:
    """S of a chunk, with the sampled tokens."""

    is_outside: Tensor  # [c, V] bool
    is_equal: Tensor | None  # [c, V] bool, tokens that count with a share; None: there are none
    log_share: Tensor | None  # [c]

    def restrict(self, logits: Tensor) -> Tensor:
        """Turn logits [c, V], in place, into those of the softmax over S; returns them."""
        if self.is_equal is not None and self.log_share is not None:
            logits.add_(torch.where(self.is_equal, self.log_share[:, None], 0.0))
        return logits.masked_fill_(self.is_outside, FLOOR)


@dataclass(frozen=True, slots=True)
class KeptSet:
    """S of each token, as the smallest logit in it.

    With top_p, several tokens may have this logit although only some of them fit. Which of them a sampler keeps is
    arbitrary, so each counts with the share that is kept: Z is exact, and the gradient a mean over the choices.
    """

    lowest: Tensor  # [c]
    log_share: Tensor | None  # [c] <= 0; None: all of them are kept

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(self.lowest[rows], None if self.log_share is None else self.log_share[rows])

    def __setitem__(self, rows: slice | Tensor, kept: KeptSet) -> None:
        self.lowest[rows] = kept.lowest
        if self.log_share is not None and kept.log_share is not None:
            self.log_share[rows] = kept.log_share

    def mask(self, logits: Tensor, targets: Tensor) -> Mask:
        """S in logits [c, V] of the distribution that it belongs to; targets are [c] int64."""
        lowest = self.lowest[:, None]
        is_outside = (logits < lowest).scatter_(1, targets[:, None], False)
        return Mask(is_outside, None if self.log_share is None else logits == lowest, self.log_share)


@dataclass(frozen=True, slots=True)
class TokenTruncation:
    """The truncation of M tokens."""

    cuts: Truncation
    history: TokenHistory | None  # None: there is no repetition penalty

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(self.cuts, None if self.history is None else self.history[rows])

    def penalties(self, logits: Tensor) -> Tensor | None:
        """[c, V] factors of the repetition penalty on logits [c, V], constants; None: there is no penalty."""
        if self.history is None:
            return None
        ids, penalty = self.history.tokens(), logits.new_full((), self.cuts.repetition_penalty)
        is_positive = logits.detach().gather(1, ids) > 0
        return torch.ones_like(logits).scatter_(1, ids, torch.where(is_positive, 1 / penalty, penalty))

    def empty(self, like: Tensor, dtype: torch.dtype) -> KeptSet | None:
        """Room for the S of M tokens, on the device of `like` [M, ...]; None: S is the whole vocabulary."""
        if self.cuts.is_whole:
            return None
        lowest = like.new_empty(like.shape[0], dtype=dtype)
        return KeptSet(lowest, torch.empty_like(lowest) if self.cuts.top_p < 1 else None)

    def kept(self, logits: Tensor) -> KeptSet | None:
        """S of logits [c, V] after the penalty; None: the whole vocabulary."""
        if self.cuts.is_whole:
            return None
        parts = [self._kept(rows) for rows in torch.split(logits, _rows_at_once(logits))]
        shares = [part.log_share for part in parts if part.log_share is not None]
        return KeptSet(torch.cat([part.lowest for part in parts]), torch.cat(shares) if shares else None)

    def _kept(self, logits: Tensor) -> KeptSet:
        cuts, largest = self.cuts, logits.amax(1)
        lowest = largest + math.log(cuts.min_p) if cuts.min_p else torch.full_like(largest, -math.inf)
        if cuts.top_p < 1.0:
            return _nucleus(logits, lowest, cuts, num_sorted=cuts.top_k or _SORTED)
        if cuts.top_k:
            last = logits.topk(min(cuts.top_k, logits.size(1)), dim=1).values[:, -1]
            lowest = torch.maximum(lowest, last)
        return KeptSet(lowest, None)


def _nucleus(logits: Tensor, lowest: Tensor, cuts: Truncation, *, num_sorted: int) -> KeptSet:
    """The fewest of the largest logits with at least top_p of the probability of all that can be kept.

    Args:
        logits: [c, V].
        lowest: [c] tokens with smaller logits cannot be kept.
        cuts: With top_p < 1.
        num_sorted: Number of largest logits to sort; more where it is too small. With a top_k, it is top_k, and only
            these logits and what equals the last of them can be kept.
    """
    values = logits.topk(min(num_sorted, logits.size(1)), dim=1).values
    largest, smallest = values[:, :1], values[:, -1:]
    weights = (values - largest).exp().masked_fill(values < lowest[:, None], 0.0)
    with cumsum_permitted():
        sums = weights.cumsum(1)
    num_more = _count(logits, smallest) - _count(values, smallest)  # not sorted, as likely as the last one that is
    if cuts.top_k:
        wanted = cuts.top_p * (sums[:, -1] + num_more * weights[:, -1])
    else:
        all_weights = (logits - largest).exp_()
        if cuts.min_p:
            all_weights.masked_fill_(logits < lowest[:, None], 0.0)
        wanted = cuts.top_p * all_weights.sum(1)
    # A token is kept if those before it have less than the wanted probability; the first one always is.
    count = ((sums - weights < wanted[:, None]) & (weights > 0)).sum(1).clamp(min=1)
    last = values.gather(1, count[:, None] - 1)
    above = torch.where(values > last, weights, 0.0).sum(1)
    num_equal = _count(values, last) + num_more.where((last == smallest).squeeze(1), 0.0)
    num_kept = ((wanted - above) / (last - largest).exp().squeeze(1)).ceil().clamp(min=1).minimum(num_equal)
    kept = KeptSet(last.squeeze(1), (num_kept / num_equal).log())
    if not cuts.top_k and num_sorted < logits.size(1):
        rows = (sums[:, -1] < wanted).nonzero().squeeze(1)
        if len(rows):
            kept[rows] = _nucleus(logits[rows], lowest[rows], cuts, num_sorted=8 * num_sorted)
    return kept


def _count(logits: Tensor, value: Tensor) -> Tensor:
    """[c] how many of logits [c, V] equal value [c, 1]; exact up to 2^24."""
    # On a CPU, a sum of floats is five times as fast as one of bools.
    return torch.eq(logits, value, out=torch.empty_like(logits)).sum(1)


def _rows_at_once(logits: Tensor) -> int:
    """Rows of logits [c, V] whose S is found at once: on a CPU so few that what is made of them fits in its caches."""
    return max(_CACHED // logits.size(1), 1) if logits.device.type == "cpu" else max(logits.size(0), 1)
