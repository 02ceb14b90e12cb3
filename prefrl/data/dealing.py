"""Distribute the rows of an optimizer step over ranks, so that all ranks have about the same amount of work."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import fsum
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import datasets
import numpy as np

from prefrl.data.rows import list_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prefrl.data.formats import AnyDataset

__all__ = ["Dealing", "cost_of_segments", "deal", "dealing_of", "forward_cost"]

T = TypeVar("T")
Lengths = TypeVar("Lengths", float, "NDArray[np.float64]")

# Columns of prepared rows that hold tokens have this suffix: the prompt, responses to it, or whole sequences.
_PROMPT, _TOKENS = "prompt_ids", "_ids"


def deal(costs: Sequence[float], num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Distribute items over parts so that the most expensive part costs little more than the others.

    Starting with the most expensive, each item goes to the part with the lowest cost so far. The most expensive part
    then costs at most a third more than in the best possible distribution. Consecutive shares are used instead if they
    are as good.

    Args:
        costs: Cost of each item, >= 0.
        num_parts: Number of parts.
        equal_counts: The numbers of items of any two parts must differ by at most one.

    Returns:
        The item numbers of each part, the most expensive first.

    Source: Graham 1969, SIAM Journal on Applied Mathematics 17(2) (longest processing time first)
    """
    count = len(costs)
    shares = [range(count * part // num_parts, count * (part + 1) // num_parts) for part in range(num_parts)]
    room = [len(share) if equal_counts else count for share in shares]
    loads = [(0.0, part) for part in range(num_parts) if room[part]]  # a heap
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item in _costliest_first(range(count), costs):
        load, part = loads[0]
        parts[part].append(item)
        if len(parts[part]) < room[part]:
            heapq.heapreplace(loads, (load + costs[item], part))
        else:
            heapq.heappop(loads)
    consecutive = [_costliest_first(share, costs) for share in shares]
    return min(consecutive, parts, key=lambda dealt: max(fsum(costs[item] for item in part) for part in dealt))


def _costliest_first(items: Sequence[int], costs: Sequence[float]) -> list[int]:
    return sorted(items, key=lambda item: -costs[item])


def forward_cost(prompt: Lengths, responses: Sequence[Lengths], *, hidden_size: int) -> Lengths:
    """The cost of rows with a common prompt, in units of a token without attention:

        P + sum R_i + [P^2 + sum((P + R_i)^2 - P^2)] / (12 h)

    This is the formula of `models.flops` for layers with 12 h^2 weights, without the head.

    Args:
        prompt: P, tokens of the prompt; 0 if there is none.
        responses: R_i, tokens of each response.
        hidden_size: h.
    """
    segments = [(0 * prompt, prompt)]
    segments += [(prompt, response) for response in responses]
    return cost_of_segments(segments, hidden_size=hidden_size)


def cost_of_segments(segments: Sequence[tuple[Lengths, Lengths]], *, hidden_size: int) -> Lengths:
    """`forward_cost` of prompts and responses of which each is computed once: sum L_i + [L_i^2 + 2 C_i L_i] / (12 h).

    Args:
        segments: C_i, tokens before each prompt or response, and L_i, its own; at least one.
        hidden_size: h.
    """
    tokens = reduce(add, (length for _, length in segments))
    pairs = reduce(add, (length * (2 * before + length) for before, length in segments))
    return tokens + pairs / (12 * hidden_size)


@dataclass(frozen=True)
class Dealing:
    """Decides which rows of a step a rank takes.

    Args:
        cost_of: Cost of a row, given its number in a dataset, or the row itself in a stream.
        equal_counts: Ranks take equal numbers of rows, up to one. Otherwise the numbers may differ to balance costs.
    """

    cost_of: Callable[[Any], float]
    equal_counts: bool

    def share(self, rows: Sequence[T], *, rank: int, world_size: int) -> list[T]:
        """The rows of a rank, the most expensive first."""
        costs = [self.cost_of(row) for row in rows]
        return [rows[item] for item in deal(costs, world_size, equal_counts=self.equal_counts)[rank]]


def dealing_of(dataset: AnyDataset, *, hidden_size: int, equal_counts: bool) -> Dealing:
    """The way in which the prepared rows of a dataset or stream are distributed.

    Args:
        dataset: With `prompt_ids` and columns of responses to it, or with columns of whole sequences.
        hidden_size: Hidden size of the model.
        equal_counts: See `Dealing`.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return Dealing(lambda row: _row_cost(row, hidden_size), equal_counts)
    names = [name for name in dataset.column_names if name.endswith(_TOKENS)]
    lengths = {name: list_lengths(dataset, name).astype(float) for name in names}
    prompt = lengths.pop(_PROMPT, np.zeros(len(dataset)))
    costs = forward_cost(prompt, list(lengths.values()), hidden_size=hidden_size)
    return Dealing(lambda row: float(costs[row]), equal_counts)


def _row_cost(row: Mapping[str, Any], hidden_size: int) -> float:
    lengths = {name: float(len(tokens or ())) for name, tokens in row.items() if name.endswith(_TOKENS)}
    return forward_cost(lengths.pop(_PROMPT, 0.0), list(lengths.values()), hidden_size=hidden_size)
