"""Reproducible initialization of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw random numbers from `seed` inside, and restore torch's global random states afterwards.

    None: draw from the global states.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
