"""Trainers in deterministic mode and with compiled layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.cases import REPRESENTATIVES, make_trainer, relative_difference, update_of

# What transformers sets for the whole process.
_VARIABLES = (
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"),
    *("ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"),
)


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _VARIABLES:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("algorithm", REPRESENTATIVES)
def test_two_deterministic_runs_are_bit_equal(algorithm: str, tmp_path: Path) -> None:
    first, second = (
        update_of(make_trainer(algorithm, tmp_path / run, full_determinism=True, max_steps=2)) for run in ("a", "b")
    )
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.equal(first, second)
    assert first.any()


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("sft", {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}),
        ("grpo", {"beta": 0.1}),
        ("reward", {"forward_plan": "padded"}),
    ],
    ids=["sft", "grpo", "reward"],
)
def test_compiled_layers_make_the_same_update(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours, plain = (
        update_of(make_trainer(algorithm, tmp_path / str(len(more)), max_steps=2, **options, **more))
        for more in (compiled, {})
    )
    assert relative_difference(ours, plain) < 1e-5
