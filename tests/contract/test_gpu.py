"""Each trainer on a CUDA device makes the same update as on the CPU, and never waits for the device within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.forward import verdict_of
from prefrl.registry import REGISTRY
from tests.contract.cases import ONLINE, make_trainer, relative_difference, stopping_model, train_inside, update_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Sampling on another device draws other tokens where a probability differs in its last bit.
_OFFLINE = [name for name in REGISTRY if name not in ONLINE]


@contextmanager
def no_waiting(step: int) -> Iterator[None]:
    """An error where the host waits for the device; the first step may, which compiles and allocates."""
    torch.cuda.set_sync_debug_mode("error" if step else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", _OFFLINE)
def test_the_update_is_that_of_the_cpu(algorithm: str, tmp_path: Path) -> None:
    on_cpu = update_of(make_trainer(algorithm, tmp_path / "cpu"))
    on_gpu = update_of(make_trainer(algorithm, tmp_path / "gpu", use_cpu=False, bf16=False, tf32=False))
    assert relative_difference(on_gpu.cpu(), on_cpu) < 1e-3


@pytest.mark.parametrize("algorithm", REGISTRY)
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"max_tokens_per_micro_batch": 40}], ids=str)
def test_a_step_does_not_wait_for_the_device(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path, use_cpu=False, max_steps=3, **options)
    verdict_of(trainer.policy)
    assert train_inside(trainer, no_waiting) == 3


def test_completions_are_the_same_with_an_offloaded_cache_and_less_memory() -> None:
    model = stopping_model(num_hidden_layers=8, eos_token_id=[1]).cuda()
    sampling = SamplingParams(num_samples=16, max_tokens=256, temperature=1.0)
    drawn, peaks = [], []
    for offloads in (False, True):
        torch.cuda.reset_peak_memory_stats()
        generator = LocalGenerator(model, offloads_cache=offloads)
        drawn.append(generator.generate([[5, 6, 7]], sampling, seeds=[0]))
        peaks.append(torch.cuda.max_memory_allocated())
    assert drawn[0] == drawn[1]
    assert peaks[1] < peaks[0]
