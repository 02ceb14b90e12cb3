"""Each trainer on a CUDA device makes the same update as on the CPU, and never waits for the device within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.forward import verdict_of
from prefrl.registry import REGISTRY
from prefrl.trainer.features.guard import Guard
from prefrl.trainer.features.sizes import AutomaticSizes
from tests.assets import tiny_model
from tests.contract.cases import ONLINE, make_trainer, relative_difference, train_inside, update_of
from tests.contract.test_guard import EVERYTHING, Breaks

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


class _NeverWaits(TrainerCallback):
    """An error where the host waits for all that is queued, from the second step to the end of the third."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step == 1:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """HuggingFace's hook."""
        if state.global_step == 3:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", _OFFLINE)
def test_the_queue_is_never_drained_between_two_logs(algorithm: str, tmp_path: Path) -> None:
    options = {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "max_steps": 4, "logging_steps": 100}
    trainer = make_trainer(algorithm, tmp_path, use_cpu=False, callbacks=[_NeverWaits()], **options)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_step_that_is_not_finite_changes_nothing(optim: str, tmp_path: Path) -> None:
    options = {"optim": optim, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_steps": 4}
    trainer = make_trainer("sft", tmp_path, use_cpu=False, on_nan="skip", **options)
    breaks = Breaks(trainer, "gradient", (2,))
    trainer.train()
    assert breaks.changed == [EVERYTHING, [], EVERYTHING, EVERYTHING]
    assert trainer.parts[Guard].steps.num_skipped == 1


def test_completions_are_the_same_with_an_offloaded_cache_and_less_memory() -> None:
    model = tiny_model(num_hidden_layers=8, eos_token_id=[1]).cuda()
    sampling = SamplingParams(num_samples=16, max_tokens=256, temperature=1.0)
    drawn, peaks = [], []
    for offloads in (False, True):
        torch.cuda.reset_peak_memory_stats()
        generator = LocalGenerator(model, offloads_cache=offloads)
        drawn.append(generator.generate([[5, 6, 7]], sampling, seeds=[0]))
        peaks.append(torch.cuda.max_memory_allocated())
    assert drawn[0] == drawn[1]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_two_deterministic_runs_are_bit_equal(algorithm: str, tmp_path: Path) -> None:
    try:
        first, second = (
            update_of(make_trainer(algorithm, tmp_path / run, use_cpu=False, full_determinism=True, max_steps=2))
            for run in ("a", "b")
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)


@pytest.mark.parametrize("precision", [{"tf32": True}, {"torch_compile": True, "tf32": False}], ids=str)
def test_the_update_is_near_that_of_the_cpu(precision: dict[str, Any], tmp_path: Path) -> None:
    on_cpu = update_of(make_trainer("sft", tmp_path / "cpu"))
    try:
        on_gpu = make_trainer("sft", tmp_path / "gpu", use_cpu=False, **precision)
        assert relative_difference(update_of(on_gpu).cpu(), on_cpu) < 0.02
        assert not verdict_of(on_gpu.policy).reasons
    finally:
        torch.backends.fp32_precision = "ieee"


def test_products_in_8_bits(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
            make_trainer("sft", tmp_path, use_cpu=False, bf16=True, fp8=True)
        return
    plain = update_of(make_trainer("sft", tmp_path / "plain", use_cpu=False, bf16=True))
    rounded = update_of(make_trainer("sft", tmp_path / "fp8", use_cpu=False, bf16=True, fp8=True))
    assert 0.01 < relative_difference(rounded, plain) < 0.4


def test_a_snapshot_of_the_memory(tmp_path: Path) -> None:
    window = {"wait": 0, "warmup": 0, "active": 1, "memory_snapshot": True}
    make_trainer("sft", tmp_path, use_cpu=False, max_steps=2, profile=True, profile_kwargs=window).train()
    snapshot = tmp_path / "profile" / "steps-1-1-rank-0.memory.pickle"
    assert snapshot.stat().st_size > 1000


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_automatic_sizes_are_found_and_make_the_step_that_was_asked_for(algorithm: str, tmp_path: Path) -> None:
    sizes = {
        "per_device_train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "effective_batch_size": 8,
    }
    precision = {"use_cpu": False, "bf16": False, "tf32": False}
    found = make_trainer(algorithm, tmp_path / "found", **sizes, **precision)
    given = make_trainer(algorithm, tmp_path / "given", per_device_train_batch_size=8, **precision)
    assert relative_difference(update_of(found), update_of(given)) < 1e-4
    rows, accumulation = found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps
    assert rows * accumulation == 8
    assert all(trial.load > 0 for trial in found.parts[AutomaticSizes].trials)
