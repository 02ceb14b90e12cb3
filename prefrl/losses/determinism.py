"""What torch's deterministic mode refuses and sampling needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["cumsum_permitted"]


@contextmanager
def cumsum_permitted() -> Iterator[None]:
    """Context in which deterministic mode lets CUDA sum cumulatively: torch warns instead of an error.

    It has no deterministic algorithm for this, see `torch.use_deterministic_algorithms`. What may differ is the order
    in which the probabilities of tokens are added.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=is_lenient)
