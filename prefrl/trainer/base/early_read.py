"""Reads numbers of the device without waiting for what is queued behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EarlyRead"]


class EarlyRead:
    """Numbers that the host reads later, at which it waits only for what was queued before this was made.

    Args:
        numbers: [M, n] on the device; they stay as they are until they are read.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._copy, self._mark = numbers, None
        if numbers.is_cuda:
            self._copy = numbers.to("cpu", non_blocking=True)
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._mark.record(torch.cuda.current_stream(numbers.device))  # a reward may have set another device

    def numbers(self) -> list[list[float]]:
        """[M][n]."""
        if self._mark is not None:
            self._mark.synchronize()
        found: list[list[float]] = self._copy.tolist()
        return found
