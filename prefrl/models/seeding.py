"""Random weights that follow from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from `seed`; afterwards torch's global random states are as before. None: draw from those states."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
