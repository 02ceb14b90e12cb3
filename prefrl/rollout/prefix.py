"""Finds prefixes that completions of a prompt share although their rewards differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["contested_prefix_lengths"]


def contested_prefix_lengths(
    completions: Sequence[Sequence[int]], rewards: Sequence[float], groups: Sequence[int], *, min_tokens: int
) -> list[int]:
    """Number of leading tokens of each completion to exclude from the loss, because the rewards disagree on them.

        n_b = max over c in the group of b with R_c != R_b of (tokens that b and c share from the start)

    and 0 if that is below `min_tokens`. A completion with another reward has the same first n_b tokens. Advantages
    that average 0 over a group cancel on a prefix that the whole group shares, so masking it loses little. If only
    some completions share a prefix, the sum of their advantages is an unbiased estimate of what the prefix is worth,
    and masking throws it away.

    A completion that is a prefix of one with another reward, or equal to it, is masked entirely. A completion with a
    NaN reward gets 0 and masks no others.

    cosmos-rl masks only the deepest shared prefixes: if completions with rewards (1, 0, 1) share 5 tokens and the
    first two share 2 more, it masks 7, 7, 0 where this function masks 7, 7, 5. It also never masks a whole completion.

    Args:
        completions: [B] token ids.
        rewards: [B] total rewards.
        groups: [B], equal for the completions of a prompt.
        min_tokens: Length of the shortest prefix that is masked, >= 1.

    Returns:
        [B] number of leading tokens without a loss.

    Raises:
        ValueError: Lengths differ, or `min_tokens` is below 1.

    Source: cosmos-rl, `min_filter_prefix_tokens`
    """
    if not len(completions) == len(rewards) == len(groups):
        raise ValueError(f"{len(completions)} completions, {len(rewards)} rewards, {len(groups)} groups: must match")
    if min_tokens < 1:
        raise ValueError(f"min_tokens={min_tokens}: needs to be >= 1")
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    lengths = [0] * len(completions)
    for members in rows.values():
        ordered = sorted(members, key=lambda row: tuple(completions[row]))
        found = _contested([completions[row] for row in ordered], [rewards[row] for row in ordered])
        for row, length in zip(ordered, found, strict=True):
            lengths[row] = length if length >= min_tokens else 0
    return lengths


def _contested(completions: list[Sequence[int]], rewards: list[float]) -> list[int]:
    """The lengths for one group, whose completions are in lexical order.

    In this order, the length of two completions' shared prefix is the minimum over the neighbors between them. So
    going outward from a completion, the first one with another reward shares the most tokens.
    """
    shared = [_num_shared(a, b) for a, b in itertools.pairwise(completions)]
    found = []
    for i, reward in enumerate(rewards):
        after = _first_other(reward, rewards[i + 1 :], shared[i:])
        before = _first_other(reward, rewards[:i][::-1], shared[:i][::-1])
        found.append(max(before, after))
    return found


def _first_other(reward: float, others: list[float], shared: list[int]) -> int:
    """Number of tokens shared with the nearest completion that has another reward; 0 if there is none."""
    if math.isnan(reward):
        return 0
    for i, other in enumerate(others):
        if other != reward and not math.isnan(other):
            return min(shared[: i + 1])
    return 0


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differs[0]) if len(differs) else size
