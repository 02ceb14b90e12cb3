"""Random numbers that rewards draw from the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["own_randomness"]


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Context in which the global generators are seeded; afterwards they are as they were before.

    They are those of `random`, NumPy and torch; those of CUDA devices only if CUDA is in use.

    Args:
        seed: At least 0. What is drawn differs from what a `torch.Generator` with this seed draws.
    """
    # SeedSequence, because a sampler may use the same seed.
    own = int(np.random.SeedSequence(seed).generate_state(1)[0])
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    generators = [torch.default_generator, *(torch.cuda.default_generators if in_use else ())]
    python, numpy, states = random.getstate(), np.random.get_state(), [each.get_state() for each in generators]
    random.seed(own)
    np.random.seed(own)
    for generator in generators:
        generator.manual_seed(own)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
