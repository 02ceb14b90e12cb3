"""Coordinate ranks that need different numbers of forward passes of models with partitioned weights.

Every rank has to take part in every pass of the others. If all ranks start together, they pad to the same number of
passes, see `missing_passes`; otherwise they take turns, see `in_company`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from prefrl.distributed.processes import max_over_ranks, min_over_ranks, world_size
from prefrl.distributed.shards import is_sharded, release, unwrap

# A model, and a function that runs one idle pass of it, without a result.
Scorer = tuple[nn.Module, Callable[[], object]]


def missing_passes(model: nn.Module, num_passes: int, device: torch.device) -> int:
    """Number of extra passes of a partitioned model that this rank has to run; 0 for any other model.

    All ranks must call it before the first pass, each with its own number of passes.
    """
    if world_size() == 1 or not is_sharded(unwrap(model)):
        return 0
    return int(max_over_ranks([num_passes], device)[0]) - num_passes


@contextmanager
def in_company(models: Sequence[Scorer], device: torch.device) -> Iterator[None]:
    """Inside, ranks may run different numbers of no-grad forward passes of partitioned models.

    All ranks must enter.

    Before each pass the ranks agree which model runs: the first in `models` that any rank requests. A rank that did
    not request it runs the model's idle pass, without a result, and requests again. A rank that has finished runs idle
    passes until all ranks have finished.

    If a rank raises inside, its process must end, and the launcher ends the others: the failing rank cannot know which
    passes they wait for.

    Args:
        models: Each with its idle pass, in the same order on all ranks. Models that are not partitioned are ignored.
        device: Device for the communication between ranks.
    """
    sharded = [(unwrap(model), idle) for model, idle in models if is_sharded(unwrap(model))]
    if world_size() == 1 or not sharded:
        yield
        return
    turns = _Turns([idle for _, idle in sharded], device)
    handles = [
        model.register_forward_pre_hook(turns.hook_of(number), prepend=True)
        for number, (model, _) in enumerate(sharded)
    ]
    try:
        yield
        turns.wait_for(len(sharded))
    finally:
        for handle in handles:
            handle.remove()
        for model, _ in sharded:
            release(model)


class _Turns:
    """Lets ranks agree on the model that runs next: the smallest number that any rank requests."""

    def __init__(self, idle_passes: Sequence[Callable[[], object]], device: torch.device) -> None:
        self._idle_passes = idle_passes
        self._device = device
        self._is_idle = False

    def hook_of(self, number: int) -> Callable[..., None]:
        """A hook that waits for the model's turn before each of its passes."""

        def hook(*_: object) -> None:
            if not self._is_idle:
                self.wait_for(number)

        return hook

    def wait_for(self, wanted: int) -> None:
        """Take part in passes of others until it is `wanted`'s turn; the number of models means until all finish."""
        while (turn := int(min_over_ranks([wanted], self._device)[0])) != wanted:
            self._is_idle = True
            try:
                self._idle_passes[turn]()
            finally:
                self._is_idle = False
