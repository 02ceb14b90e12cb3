"""Requests generation batches before training needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefrl.rollout.collect import Request

__all__ = ["PrefetchQueue"]


class PrefetchQueue:
    """A queue of requests that runs ahead of training by a bounded number of generation batches.

    A batch is requested at most `num_ahead` batches before it is trained on, so no completion is ever too old and
    none is thrown away.

    Args:
        ask: Requests the generation batch with this number, counted from the start of training.
        num_ahead: Number of batches that may be requested in advance, in addition to the one that is needed.
    """

    def __init__(self, ask: Callable[[int], Request], *, num_ahead: int) -> None:
        self._ask = ask
        self._num_ahead = num_ahead
        self._queue: deque[tuple[int, Request]] = deque()

    def take(self, number: int, *, last: int) -> Request:
        """The request of the generation batch that is needed now. First requests all batches that are allowed by now.

        Args:
            number: Number of the batch.
            last: Number of the last batch of training.
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
        """Cancel all pending requests."""
        for _, request in self._queue:
            request.pending.cancel()
        self._queue.clear()
