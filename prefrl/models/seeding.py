"""Random numbers of torch's global generators, drawn from a seed of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw random numbers from `seed` inside, and restore torch's global random states afterwards.

    Those of GPUs only if they are in use: to ask for their states would start CUDA, also in a run on the CPU.
    None: draw from the global states.
    """
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            generators.extend(accelerator.default_generators)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
