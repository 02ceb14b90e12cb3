"""Beginnings that completions of a prompt share although their rewards differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["contested_prefix_lengths"]


def contested_prefix_lengths(
    completions: Sequence[Sequence[int]], rewards: Sequence[float], groups: Sequence[int], *, min_tokens: int
) -> list[int]:
    """How many leading tokens of each completion have no loss, because rewards contradict each other about them.

        n_b = max over c in the group of b with R_c != R_b of (tokens that b and c share from the start)

    and 0 where that is below `min_tokens`. A token within n_b was also chosen, after the same tokens, by a completion
    with another reward. Advantages that are 0 on average over a group cancel on what all of it shares, so little is
    lost there; where only some share a prefix, the sum of their advantages is an unbiased estimate of the prefix's
    worth and masking throws it away.

    A completion that is wholly the beginning of one with another reward, or equal to it, is masked wholly. NaN rewards
    say nothing: such a completion gets 0 and masks nothing of others.

    cosmos-rl masks the deepest shared prefixes alone: with 5 tokens shared by rewards (1, 0, 1) and 2 more by the
    first two, it masks 7, 7, 0 and this function 7, 7, 5; and it never masks a whole completion.

    Args:
        completions: [B] token ids.
        rewards: [B] totals.
        groups: [B], equal for the completions of a prompt.
        min_tokens: Shortest prefix that is masked, >= 1.

    Returns:
        [B] leading tokens without a loss.

    Raises:
        ValueError: Lengths differ, or `min_tokens` is below 1.

    Source: cosmos-rl, `min_filter_prefix_tokens`
    """
    if not len(completions) == len(rewards) == len(groups):
        raise ValueError(f"{len(completions)} completions, {len(rewards)} rewards, {len(groups)} groups: need as many")
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
    """The lengths of one group in lexical order.

    There, two completions share as many tokens as the least that neighbors between them share: going outwards, the
    first with another reward shares the most.
    """
    shared = [_num_shared(a, b) for a, b in itertools.pairwise(completions)]
    found = []
    for i, reward in enumerate(rewards):
        after = _first_other(reward, rewards[i + 1 :], shared[i:])
        before = _first_other(reward, rewards[:i][::-1], shared[:i][::-1])
        found.append(max(before, after))
    return found


def _first_other(reward: float, others: list[float], shared: list[int]) -> int:
    """Tokens shared with the nearest completion that has another reward; 0 if there is none."""
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
