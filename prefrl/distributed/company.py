"""Ranks that need different numbers of forward passes of models whose weights are partitioned over them.

Each of them has to take part in every pass of the others: in as many as each other where all begin together, see
`missing_passes`; in turns where they do not, see `in_company`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from prefrl.distributed.processes import max_over_ranks, min_over_ranks, world_size
from prefrl.distributed.shards import is_sharded, release, unwrap

# A model, and what runs one pass of it without a result.
Scorer = tuple[nn.Module, Callable[[], object]]


def missing_passes(model: nn.Module, num_passes: int, device: torch.device) -> int:
    """Passes of a partitioned model that this rank has to run besides its own; 0 for any other model.

    All ranks must call it before the first of these passes, each with its own number.
    """
    if world_size() == 1 or not is_sharded(unwrap(model)):
        return 0
    return int(max_over_ranks([num_passes], device)[0]) - num_passes


@contextmanager
def in_company(models: Sequence[Scorer], device: torch.device) -> Iterator[None]:
    """Ranks may run different numbers of forward passes of partitioned models inside, without gradients.

    All ranks must enter.

    Before each pass the ranks agree whose turn it is: of the models that are asked for, the first. A rank that did not
    ask for it runs its idle pass, without a result, and asks again. A rank that is done does so until all are.

    A rank that raises inside ends its process, and the launcher ends the others: what they wait for, it cannot know.

    Args:
        models: Each with its idle pass, in the same order on all ranks. Those that are not partitioned are left out.
        device: Where the ranks' questions travel.
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
    """Agrees over ranks which model runs next: the smallest number that a rank asks for."""

    def __init__(self, idle_passes: Sequence[Callable[[], object]], device: torch.device) -> None:
        self._idle_passes = idle_passes
        self._device = device
        self._is_idle = False

    def hook_of(self, number: int) -> Callable[..., None]:
        """Waits for the turn of a model before each of its passes."""

        def hook(*_: object) -> None:
            if not self._is_idle:
                self.wait_for(number)

        return hook

    def wait_for(self, wanted: int) -> None:
        """Take part in the passes of others until it is the turn of `wanted`; one more than there are: to the end."""
        while (turn := int(min_over_ranks([wanted], self._device)[0])) != wanted:
            self._is_idle = True
            try:
                self._idle_passes[turn]()
            finally:
                self._is_idle = False
