"""Choose the rows of each micro-batch of each rank, so that all ranks have about the same amount of work.

The order of rows depends only on (seed, epoch); ranks and micro-batches only divide it up. The rows of an optimizer
step are therefore the same however the work is cut, and a group of completions is sampled on one rank.

Streams are cut in the same way as `StepBatchSampler` cuts a map-style dataset, or by position: every rank reads the
whole stream and takes its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial, reduce
from itertools import count, islice, repeat
from math import fsum
from operator import add
from typing import Any, TypeVar

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, Sampler

from prefrl.data.formats import AnyDataset
from prefrl.data.packing import list_lengths
from prefrl.errors import DataError

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


@lru_cache(maxsize=4)
def _order(num_rows: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    if not shuffle:
        return list(range(num_rows))
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def positions_of_rank(num_prompts: int, *, num_updates: int, rank: int, world_size: int) -> list[int]:
    """The prompts of a generation batch that go to a rank, in the order in which the rank learns from them.

    The batch is cut into `num_updates` optimizer steps, and a rank takes prompts of each. If the prompts do not divide
    evenly for that, it takes consecutive prompts, and numbers of prompts differ by at most one between ranks.
    """
    parts = num_updates if num_prompts % (num_updates * world_size) == 0 else 1
    shares = [part * world_size + rank for part in range(parts)]
    starts = [num_prompts * share // (parts * world_size) for share in range(parts * world_size + 1)]
    return [position for share in shares for position in range(starts[share], starts[share + 1])]


def cut_step(
    rows: Sequence[T],
    *,
    micro_batch_size: int,
    micro_batches_per_step: int,
    rank: int,
    world_size: int,
    dealing: Dealing | None = None,
) -> list[list[T]]:
    """The micro-batches of one rank for the rows of one optimizer step.

    Every step has `micro_batches_per_step` micro-batches on every rank, because HuggingFace updates after that many.
    In a shorter step, some of them are empty or not full.

    Args:
        rows: Rows of all ranks; at most `micro_batch_size * micro_batches_per_step * world_size`.
        micro_batch_size: Rows of a full micro-batch; more if ranks take different numbers of rows.
        micro_batches_per_step: Gradient accumulation steps.
        rank: This process's number.
        world_size: Number of processes.
        dealing: Which rows a rank takes; None: consecutive shares that differ by at most one row.
    """
    if dealing is None:
        mine = list(rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size])
    else:
        mine = dealing.share(rows, rank=rank, world_size=world_size)
    size = max(micro_batch_size, -(-len(mine) // micro_batches_per_step))
    return [mine[i * size : (i + 1) * size] for i in range(micro_batches_per_step)]


@dataclass(eq=False)
class StepBatchSampler(Sampler[list[int]]):
    """Micro-batches of dataset rows. Each optimizer step takes the next rows of one global order.

    The rows left over at the end of an epoch make a shorter step: no row is seen twice and, unless `drop_last`, none
    is skipped. All steps of all ranks have the same number of micro-batches; in the shorter one, some may be empty.

    Args:
        num_rows: Size of the dataset.
        micro_batch_size: See `cut_step`.
        micro_batches_per_step: Gradient accumulation steps.
        rank: This process's number.
        world_size: Number of processes.
        dealing: Which rows of a step a rank takes, see `cut_step`.
        shuffle: A new order each epoch, or the dataset's own.
        seed: Seed of the order.
        drop_last: Skip the shorter step.
    """

    num_rows: int
    _: KW_ONLY
    micro_batch_size: int
    micro_batches_per_step: int = 1
    rank: int = 0
    world_size: int = 1
    dealing: Dealing | None = None
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    epoch: int = field(default=0, init=False)
    rows_per_step: int = field(init=False)  # of a full optimizer step, over all ranks

    def __post_init__(self) -> None:
        """Count the rows of a step."""
        self.rows_per_step = self.micro_batch_size * self.micro_batches_per_step * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        full_steps, rest = divmod(self.num_rows, self.rows_per_step)
        num_steps = full_steps + (rest > 0 and not self.drop_last)
        return num_steps * self.micro_batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        order = _order(self.num_rows, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        num_steps = len(self) // self.micro_batches_per_step
        for start in range(0, num_steps * self.rows_per_step, self.rows_per_step):
            yield from cut_step(
                order[start : start + self.rows_per_step],
                micro_batch_size=self.micro_batch_size,
                micro_batches_per_step=self.micro_batches_per_step,
                rank=self.rank,
                world_size=self.world_size,
                dealing=self.dealing,
            )


class GenerationBatchSampler(Sampler[list[int]]):
    """The prompts of generation batches, and an empty item for each micro-batch that learns from them.

    Prompts are read by the number of their generation batch, perhaps steps ahead. HuggingFace counts the items, so its
    epochs and its skipping of data on resume are correct. Prompts that do not fill a last window of `items_per_window`
    micro-batches are skipped in the epoch.

    Args:
        num_rows: Number of prompts in the dataset.
        prompts_per_window: Prompts of a generation batch over all ranks.
        items_per_window: Micro-batches that learn from a generation batch, including repeated iterations.
        shuffle: A new order each epoch, or the dataset's own.
        seed: Seed of the order.
    """

    def __init__(
        self, num_rows: int, *, prompts_per_window: int, items_per_window: int, shuffle: bool, seed: int
    ) -> None:
        self.num_rows = num_rows
        self.prompts_per_window = prompts_per_window
        self.num_windows = num_rows // prompts_per_window  # in an epoch
        self.items_per_window = items_per_window
        self.shuffle = shuffle
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """The items of all epochs are equal."""

    def __len__(self) -> int:
        return self.num_windows * self.items_per_window

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[] for _ in range(len(self))])

    def rows_of_generation(self, number: int) -> list[int]:
        """The prompts of all ranks in the generation batch with this number, counted from the start of training."""
        epoch, window = divmod(number, self.num_windows)
        order = _order(self.num_rows, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        return order[window * self.prompts_per_window :][: self.prompts_per_window]


class EpochDataLoader(DataLoader[Any]):
    """A DataLoader that passes `set_epoch` on to its batch sampler and does not use torch's global generator."""

    def __init__(self, dataset: Any, batch_sampler: StepBatchSampler | GenerationBatchSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, generator=torch.Generator(), **options)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]  # one of ours, see __init__


Row = dict[str, Any]


class _MicroBatches(IterableDataset[list[Row]]):
    """The rows of each micro-batch of a rank, see `StreamLoader`."""

    def __init__(
        self,
        stream: datasets.IterableDataset,
        *,
        cut: Callable[[list[Row]], list[list[Row]]],
        rows_per_step: int,
        drop_last: bool,
        repeat: bool,
    ) -> None:
        self.stream = stream
        self.cut = cut
        self.rows_per_step = rows_per_step
        self.drop_last = drop_last
        self.repeat = repeat
        self.epoch = 0

    def __iter__(self) -> Iterator[list[Row]]:
        for epoch in count(self.epoch) if self.repeat else [self.epoch]:
            self.stream.set_epoch(epoch)
            is_empty = True
            for step in self._steps():
                is_empty = False
                yield from self.cut(step)
            if is_empty:
                missing = f"full step of {self.rows_per_step} rows (drop_last=True)" if self.drop_last else "rows"
                raise DataError(f"the stream has no {missing}. Check its source and its filters")

    def _steps(self) -> Iterator[list[Row]]:
        """The rows of each step over all ranks; the last may have fewer."""
        rows = iter(self.stream)
        while step := list(islice(rows, self.rows_per_step)):
            if len(step) == self.rows_per_step or not self.drop_last:
                yield step


class StreamLoader(DataLoader[Any]):
    """Collated micro-batches of one rank from a stream, in the stream's order.

    Each step takes the next rows of the stream and is cut as `StepBatchSampler` cuts it. The loader has no length, so
    HuggingFace asks for `max_steps`. Rows of other ranks are read but not collated.

    HuggingFace treats a whole run over a stream as one epoch. On resume it skips the items of all earlier steps, which
    may be more than one pass over the stream has. With `repeat`, a single iteration goes through the stream again and
    again, so that a run can resume after any step.

    Args:
        dataset: Prepared rows.
        micro_batch_size: Rows of a micro-batch on one rank.
        micro_batches_per_step: Gradient accumulation steps.
        rank: This process's number.
        world_size: Number of processes.
        dealing: Which rows of a step a rank takes, see `cut_step`.
        drop_last: Skip the shorter step at the end of the stream.
        collate_fn: Turns the rows of a micro-batch into an item; it may be called with `[]`.
        repeat: At the end, start again with the stream's next epoch, and never stop.
    Raises:
        DataError: When read: the stream has no rows, or no full step and `drop_last`.
    """

    dataset: _MicroBatches

    def __init__(  # noqa: PLR0913 - the arguments of StepBatchSampler that apply to a stream, and three more
        self,
        dataset: datasets.IterableDataset,
        *,
        micro_batch_size: int,
        micro_batches_per_step: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        collate_fn: Callable[[list[Row]], Any],
        repeat: bool = False,
        dealing: Dealing | None = None,
    ) -> None:
        cut = partial(
            cut_step,
            micro_batch_size=micro_batch_size,
            micro_batches_per_step=micro_batches_per_step,
            rank=rank,
            world_size=world_size,
            dealing=dealing,
        )
        rows_per_step = micro_batch_size * micro_batches_per_step * world_size
        micro_batches = _MicroBatches(
            dataset, cut=cut, rows_per_step=rows_per_step, drop_last=drop_last, repeat=repeat
        )
        # Its own generator, so that torch's global one is not used.
        super().__init__(micro_batches, batch_size=None, collate_fn=collate_fn, generator=torch.Generator())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the stream that is read next."""
        self.dataset.epoch = epoch


class StreamRows:
    """Rows of a stream by position, in the stream's order. At its end, the stream starts again with its next epoch.

    Rows are read when they are asked for, and not kept: to go back, the stream is read again from its start.

    Args:
        stream: Prepared rows.
    """

    def __init__(self, stream: datasets.IterableDataset) -> None:
        self._stream = stream
        self._rows = self._endless()
        self._next = 0  # position of the row that is read next

    def __getitem__(self, position: int) -> Row:
        """The row at a position, counted from 0 through all epochs.

        Raises:
            DataError: The stream has no rows.
        """
        if position < self._next:
            self._rows, self._next = self._endless(), 0
        row = next(islice(self._rows, position - self._next, None))
        self._next = position + 1
        return row

    def _endless(self) -> Iterator[Row]:
        for epoch in count():
            self._stream.set_epoch(epoch)
            is_empty = True
            for row in self._stream:
                is_empty = False
                yield row
            if is_empty:
                raise DataError("the stream has no rows. Check its source and its filters")


class EmptyItems(IterableDataset[list[Row]]):
    """Items without rows, for ever: for a loop that counts items, where rows are read by position."""

    def __iter__(self) -> Iterator[list[Row]]:
        return repeat([])
