"""What torch's deterministic mode refuses although results here do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["cumsum_permitted"]


@contextmanager
def cumsum_permitted() -> Iterator[None]:
    """Context in which `full_determinism` lets CUDA sum cumulatively: torch then warns once, instead of an error.

    CUDA adds the numbers of several rows in a fixed order. Those of a single row it may add in another one each time,
    which changes float64 sums by a relative 1e-16.

    Source: `torch.use_deterministic_algorithms`, which lists cumsum.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=is_lenient)
