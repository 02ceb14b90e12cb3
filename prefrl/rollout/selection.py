"""Which completions are learned from: some of each group, or rows of the batch drawn with replacement.

Both choices look at rewards, so both change what is learned; how is said at each rule. Random ones depend on (seed,
step) and on group numbers alone: a group's number is its prompt's place in the generation batch, so the choice is the
same for every number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["ReweightMethod", "SelectionRule", "draw_counts", "kept_rows", "random_generator"]

SelectionRule = Literal["max_variance", "best", "random"]
ReweightMethod = Literal["pow", "max_min", "max_random"]


def random_generator(purpose: str, *numbers: int) -> np.random.Generator:
    """A generator for one purpose, the same on every rank and after a resume.

    Args:
        purpose: Keeps the streams of equal numbers apart.
        numbers: Each >= 0: the run's seed, the step, the group, ...
    """
    return np.random.default_rng(np.random.SeedSequence([zlib.crc32(purpose.encode()), *numbers]))


def kept_rows(rewards: Tensor, groups: Tensor, *, keep: int, rule: SelectionRule, seed: int, step: int) -> Tensor:
    """The rows of each group that are learned from, `keep` of its G.

    `random`: any, with equal chance. Unbiased: fewer samples of the same policy.

    `max_variance`: the set with the largest variance, which is some lowest and some highest. With rewards 0 and 1 it
    is half right and half wrong where there are as many, so a prompt with success rate p pulls in the direction of p,
    as before, but with the weight 1 / (p (1 - p)). With graded rewards the middle teaches nothing: biased.

    `best`: the highest. Biased: completions compete with good ones alone, and failures are not pushed down.

    Groups of at most `keep` rows are kept whole. A row whose reward is NaN is kept only where its group has fewer than
    `keep` with a reward, so that groups of one size stay of one size. Equal rewards: `best` keeps those that come
    first; `max_variance` keeps, of sets with the same variance, the one with the fewest low rewards.

    Advantages of the kept rows can be computed among them, which centres what is learned from, or among all G, whose
    baseline does not depend on the choice; that is the caller's.

    Args:
        rewards: [B], NaN for rows without one.
        groups: [B] int64, equal for the completions of a prompt.
        keep: Rows kept of each group, >= 1.
        rule: See above.
        seed: Of the run; read by `random` alone.
        step: Changes from one generation batch to the next; read by `random` alone.

    Returns:
        [M] int64 row numbers, ascending.

    Raises:
        ValueError: Shapes differ, an infinite reward, or `keep` below 1.

    Source: Xu et al. 2025 (PODS), arXiv 2504.13818
    """
    values = _checked(rewards, groups)
    if keep < 1:
        raise ValueError(f"keep={keep}: needs to be >= 1 row of each group")
    kept: list[int] = []
    for group, rows in _rows_by_group(groups.tolist()).items():
        scored = rows[~np.isnan(values[rows])]
        generator = random_generator("selection", seed, step, group)
        chosen = scored[_RULES[rule](values[scored], keep, generator)] if len(scored) > keep else scored
        unscored = rows[np.isnan(values[rows])]
        kept.extend([*chosen.tolist(), *unscored.tolist()][:keep])
    return torch.tensor(sorted(kept), dtype=torch.long)


def draw_counts(
    rewards: Tensor, groups: Tensor, *, method: ReweightMethod, power: float, seed: int, step: int
) -> Tensor:
    """How often each row is drawn when B rows are drawn from the B with replacement, with chances by reward.

    | method | chance in proportion to |
    |---|---|
    | pow | abs(reward)^power |
    | max_min | 1 for the highest and the lowest reward of the batch, 0 for others |
    | max_random | 0.4 for the highest reward of the batch, 0.1 for others |

    A row that is drawn c times is c rows: its loss and its share of the denominators count c times. The idea is that
    extreme rewards are the most trustworthy ones. The price is a bias: losses are weighted by these chances in
    expectation, so `pow` depends on where the reward has its zero.

    NaN rows are never drawn. If every chance is 0, rows with a reward have the same chance; if no row has a reward,
    every row counts once.

    Args:
        rewards: [B] of all ranks, NaN for rows without one.
        groups: [B] int64. Rows are drawn in the order of groups, so it does not matter which rank has which.
        method: See the table.
        power: Exponent of `pow`, >= 0.
        seed: Of the run.
        step: Changes from one generation batch to the next.

    Returns:
        [B] int64, with sum B.

    Raises:
        ValueError: Shapes differ, an infinite reward, or a negative `power`.

    Source: Zhang et al. 2024 (PF-PPO), arXiv 2409.06957, which ranks the completions of each prompt; over the whole
        batch as in verl's `pf_ppo`, without its 1e-8 on each weight
    """
    values = _checked(rewards, groups)
    if power < 0:
        raise ValueError(f"power={power}: needs to be >= 0, or rewards near 0 would be drawn most")
    order = np.argsort(groups.cpu().numpy(), kind="stable")
    candidates = order[~np.isnan(values[order])]
    if len(candidates) == 0:
        return torch.ones(len(values), dtype=torch.long)
    weights = _weights(values[candidates], method=method, power=power)
    if not weights.any():
        weights = np.ones_like(weights)
    # Only rows with a chance take part, or rounding could hand the last of them what is left over.
    candidates, weights = candidates[weights > 0], weights[weights > 0]
    drawn = random_generator("draw_counts", seed, step).multinomial(len(values), weights / weights.sum())
    counts = torch.zeros(len(values), dtype=torch.long)
    counts[torch.from_numpy(candidates)] = torch.from_numpy(drawn)
    return counts


def _checked(rewards: Tensor, groups: Tensor) -> NDArray[np.float64]:
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)}: both need to be [B]")
    if torch.isinf(rewards).any():
        raise ValueError("rewards contain an infinite value: each needs to be finite, or NaN for none")
    return np.asarray(rewards.detach().double().cpu().numpy())


def _rows_by_group(groups: Iterable[int]) -> dict[int, NDArray[np.int64]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return {group: np.array(members) for group, members in rows.items()}


def _weights(values: NDArray[np.float64], *, method: ReweightMethod, power: float) -> NDArray[np.float64]:
    highest = values == values.max()
    if method == "max_min":
        return np.asarray(highest | (values == values.min()), dtype=np.float64)
    if method == "max_random":
        return np.asarray(np.where(highest, 0.4, 0.1))
    largest = np.abs(values).max() or 1.0
    return np.asarray((np.abs(values) / largest) ** power)  # relative to the largest, so that no power overflows


def _random(values: NDArray[np.float64], keep: int, generator: np.random.Generator) -> NDArray[np.int64]:
    return generator.permutation(len(values))[:keep]


def _best(values: NDArray[np.float64], keep: int, _: np.random.Generator) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")[:keep]


def _max_variance(values: NDArray[np.float64], keep: int, _: np.random.Generator) -> NDArray[np.int64]:
    """Try every split into `low` lowest and `keep - low` highest: one of them has the largest variance.

    The highest of all is always in it, because moving the highest of a set up makes its variance larger.
    """
    order = np.argsort(values, kind="stable")
    # Measured from the lowest, so that rounding does not give equal values a difference.
    ordered = values[order] - values[order[0]]
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    low = np.arange(keep)
    high = len(values) - keep + low  # where the highest begin
    total = sums[low] + sums[-1] - sums[high]
    spread = keep * (squares[low] + squares[-1] - squares[high]) - total**2  # variance * keep^2
    most = int(np.argmax(spread))
    return np.concatenate([order[:most], order[int(high[most]) :]])


_RULES: Mapping[SelectionRule, Callable[[NDArray[np.float64], int, np.random.Generator], NDArray[np.int64]]] = {
    "max_variance": _max_variance,
    "best": _best,
    "random": _random,
}
