"""Selects the completions to train on: some of each group, or rows drawn with replacement; and tokens of them.

Both kinds of selection look at rewards, so both change the objective; each rule says how. Random choices depend only
on (seed, step) and group numbers. The number of a group is the position of its prompt in the generation batch, so the
choice is the same for any number of ranks.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefrl.options.params import Params
from prefrl.options.rollout import KeptParams, PowParams, ReweightMethod, RowSelection, SelectionRule


def random_generator(purpose: str, *numbers: int) -> np.random.Generator:
    """A random generator for one purpose, the same on every rank and after a resume.

    Args:
        purpose: Makes the streams of different purposes independent, even with equal `numbers`.
        numbers: Each >= 0: the run's seed, the step, the group, ...
    """
    return np.random.default_rng(np.random.SeedSequence([zlib.crc32(purpose.encode()), *numbers]))


def visit_order(num_minibatches: int, num_passes: int, *, seed: int, generation: int) -> list[int]:
    """The minibatch of each visit: in order in the first pass, in a new random order in each later one.

    Args:
        num_minibatches: Minibatches of a generation batch.
        num_passes: How often each is visited.
        seed: Seed of the run.
        generation: Number of the generation batch.
    """
    passes = [
        random_generator("minibatches", seed, generation, i).permutation(num_minibatches) for i in range(1, num_passes)
    ]
    return [*range(num_minibatches), *(int(number) for order in passes for number in order)]


def row_counts(rewards: Tensor, groups: Tensor, *, rule: RowSelection, params: Params, seed: int, step: int) -> Tensor:
    """How often each row is trained on: 0 or 1 by a rule of `kept_rows`, any number by a method of `draw_counts`.

    Args:
        rewards: [B], NaN for rows without a reward.
        groups: [B] int64, equal for the completions of a prompt.
        rule: A name in `SELECTIONS`.
        params: Its hyperparameters.
        seed: Seed of the run.
        step: A number that changes with each generation batch.

    Returns:
        [B] int64.
    """
    if rule == "pow" or rule == "max_min" or rule == "max_random":
        power = params.power if isinstance(params, PowParams) else 1.0
        return draw_counts(rewards, groups, method=rule, power=power, seed=seed, step=step)
    assert isinstance(params, KeptParams)
    assert params.num_selected is not None
    kept = kept_rows(rewards, groups, keep=params.num_selected, rule=rule, seed=seed, step=step)
    return torch.zeros(len(rewards), dtype=torch.long).index_fill(0, kept, 1)


def kept_rows(rewards: Tensor, groups: Tensor, *, keep: int, rule: SelectionRule, seed: int, step: int) -> Tensor:
    """The rows of each group to train on: `keep` of its G rows.

    `random`: a uniformly random subset. Unbiased: it is the same as fewer samples of the policy.

    `max_variance`: the subset with the largest variance of rewards, which consists of some of the lowest and some of
    the highest. With rewards 0 and 1 it is half right and half wrong if there are enough of both, so the gradient of a
    prompt with success rate p keeps its direction but gets the weight 1 / (p (1 - p)). With graded rewards it is
    biased, because rows in the middle are not trained on.

    `best`: the rows with the highest rewards. Biased: completions are compared only with good ones, and failures are
    not made less likely.

    Groups of at most `keep` rows are kept whole. A row with a NaN reward is kept only if its group has fewer than
    `keep` rows with a reward, so groups of equal size keep equal sizes. On ties, `best` keeps the first rows; of
    subsets with the same variance, `max_variance` keeps the one with the fewest low rewards.

    The caller decides whether advantages of the kept rows are computed among them, which centers them, or among all
    G, whose baseline does not depend on the selection.

    Args:
        rewards: [B], NaN for rows without a reward.
        groups: [B] int64, equal for the completions of a prompt.
        keep: Number of rows to keep of each group, >= 1.
        rule: See above.
        seed: Seed of the run; used only by `random`.
        step: A number that changes with each generation batch; used only by `random`.

    Returns:
        [M] int64 row numbers, ascending.

    Raises:
        ValueError: Shapes differ, a reward is infinite, or `keep` is below 1.

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
    """How often each row is drawn when B of the B rows are drawn with replacement, with probabilities by reward.

    | method | probability in proportion to |
    |---|---|
    | pow | abs(reward)^power |
    | max_min | 1 for the highest and the lowest reward of the batch, 0 for others |
    | max_random | 0.4 for the highest reward of the batch, 0.1 for others |

    A row that is drawn c times counts as c rows, both in the loss and in its denominators. The idea is that extreme
    rewards are the most reliable ones. The cost is a bias: in expectation, losses are weighted by these probabilities,
    so `pow` depends on where the zero of the reward is.

    NaN rows are never drawn. If every probability is 0, all rows with a reward are equally likely. If no row has a
    reward, every row counts once.

    Args:
        rewards: [B] of all ranks, NaN for rows without a reward.
        groups: [B] int64. Rows are drawn in the order of groups, so their distribution over ranks does not matter.
        method: See the table.
        power: Exponent of `pow`, >= 0.
        seed: Seed of the run.
        step: A number that changes with each generation batch.

    Returns:
        [B] int64, with sum B.

    Raises:
        ValueError: Shapes differ, a reward is infinite, or `power` is negative.

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
    # Drop rows of probability 0: multinomial could otherwise assign the rounding remainder to the last of them.
    candidates, weights = candidates[weights > 0], weights[weights > 0]
    drawn = random_generator("draw_counts", seed, step).multinomial(len(values), weights / weights.sum())
    counts = torch.zeros(len(values), dtype=torch.long)
    counts[torch.from_numpy(candidates)] = torch.from_numpy(drawn)
    return counts


def _checked(rewards: Tensor, groups: Tensor) -> NDArray[np.float64]:
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)}: both need to be [B]")
    if torch.isinf(rewards).any():
        raise ValueError("rewards contain an infinite value: each needs to be finite, or NaN for no reward")
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
    return np.asarray((np.abs(values) / largest) ** power)  # relative to the largest, to avoid overflow


def _random(values: NDArray[np.float64], keep: int, generator: np.random.Generator) -> NDArray[np.int64]:
    return generator.permutation(len(values))[:keep]


def _best(values: NDArray[np.float64], keep: int, _: np.random.Generator) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")[:keep]


def _max_variance(values: NDArray[np.float64], keep: int, _: np.random.Generator) -> NDArray[np.int64]:
    """Try every split into the `low` lowest and the `keep - low` highest; one of them has the largest variance.

    The highest reward of all is always included, because raising the highest value of a set increases its variance.
    """
    order = np.argsort(values, kind="stable")
    # Relative to the lowest value, so that equal values have exactly zero variance.
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
