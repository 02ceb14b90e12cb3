"""Random numbers that rewards draw from the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from prefrl.models.modes import seeded

__all__ = ["own_randomness"]


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Context in which the global generators are seeded; afterwards they are as they were before.

    They are those of `random`, NumPy and torch; those of GPUs only if they are in use.

    Args:
        seed: At least 0. What is drawn differs from what a `torch.Generator` with this seed draws.
    """
    # SeedSequence, because a sampler may use the same seed.
    own = int(np.random.SeedSequence(seed).generate_state(1)[0])
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(own)
    np.random.seed(own)
    try:
        with seeded(own):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
