"""Generation batches that are asked for before training needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefrl.rollout.collect import Request

__all__ = ["PrefetchQueue"]


class PrefetchQueue:
    """A queue of requests that runs ahead of training by a bounded number of generation batches.

    A batch is asked for no earlier than `num_ahead` batches before it is learned from. So what arrives is never too
    old and nothing that was generated is thrown away.

    Args:
        ask: Starts the generation batch of a number, counted from the start of training.
        num_ahead: Batches that may be under way besides the one that is needed.
    """

    def __init__(self, ask: Callable[[int], Request], *, num_ahead: int) -> None:
        self._ask = ask
        self._num_ahead = num_ahead
        self._queue: deque[tuple[int, Request]] = deque()

    def take(self, number: int, *, last: int) -> Request:
        """The generation batch that is needed now; those that may be are asked for first.

        Args:
            number: Of the batch.
            last: Number of the last batch of the training.
        """
        if self._queue and self._queue[0][0] != number:
            self.drop()
        first_new = self._queue[-1][0] + 1 if self._queue else number
        for new in range(first_new, min(number + self._num_ahead, last) + 1):
            self._queue.append((new, self._ask(new)))
        return self._queue.popleft()[1]

    def __len__(self) -> int:
        return len(self._queue)

    def drop(self) -> None:
        """Give up what is under way."""
        for _, request in self._queue:
            request.pending.cancel()
        self._queue.clear()
