"""Rows of a stream: micro-batches, cut in the same way as `StepBatchSampler` cuts a map-style dataset, or by position.

Every rank reads the whole stream and takes its share, so that the rows of an optimizer step are the same however the
work is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset

from prefrl.data.samplers import cut_step
from prefrl.errors import DataError

if TYPE_CHECKING:
    from prefrl.data.samplers import Dealing

__all__ = ["EmptyItems", "StreamLoader", "StreamRows"]

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
